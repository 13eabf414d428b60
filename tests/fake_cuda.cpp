// A device "cuda:0" whose memory is the host's: every kernel is the CPU's, run on the same bytes.
// What would wait for a real device, or mix devices, is an error.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <string>

namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;
const c10::Device device(CUDA, 0);
bool strict = false;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
c10::impl::DeviceGuardImplRegistrar guard(CUDA, new Guard());

struct Allocator final : c10::Allocator {
  static void release(void* p) { std::free(p); }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? std::calloc(1, n) : nullptr;
    return {p, p, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} allocator;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

void wait(const std::string& what) {
  TORCH_CHECK(!strict, "waits for the device: ", what);
}

// The same bytes, as the other device's. The alias keeps the bytes alive.
at::Tensor relabel(const at::Tensor& t, c10::Device to) {
  if (!t.defined() || t.device() == to) return t;
  auto options = t.options().device(to).requires_grad(false);
  // a kernel may resize an empty tensor that it writes into
  if (to.is_cpu() && !t.numel()) return at::empty(t.sizes(), options);
  at::Storage storage = t.storage();
  void* start = t.numel() ? t.data_ptr() : nullptr;
  auto alias = at::from_blob(start, t.sizes(), t.strides(), [storage](void*) {}, options, to);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (t.is_conj()) alias._set_conj(true);
  if (t.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor host(const at::Tensor& t) { return relabel(t, c10::kCPU); }

const std::set<std::string> waiting = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::histc",
    "aten::is_set_to", "aten::_linalg_check_errors", "aten::multinomial"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  if (waiting.count(name)) wait(name);
  const bool index = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
  const auto n = schema.arguments().size();
  const auto begin = stack->size() - n;
  std::vector<at::Tensor> given, hosts;  // written to, maybe resized
  bool any = false;
  std::string foreign;
  auto one = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      if (t.dim() > 0 && t.is_cpu()) foreign = "a CPU tensor";
      return t;
    }
    any = true;
    const bool mask = t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
    if (index && mask && !hosts.empty()) wait(name + " by a mask");
    auto h = host(t);
    given.push_back(t);
    hosts.push_back(h);
    return h;
  };
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) {
      v = one(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor t : v.toTensorList()) made.push_back(one(t));
      v = made;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const auto& o : v.toOptionalTensorVector())
        made.push_back(o ? std::optional<at::Tensor>(one(*o)) : o);
      v = made;
    } else if (v.isDevice() && v.toDevice().is_cuda()) {
      v = c10::Device(c10::kCPU);
      any = true;
    }
  }
  if (any && !foreign.empty()) {
    TORCH_CHECK(index && !strict, name, " gets ", foreign, " together with tensors on ", device);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto back = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    for (size_t i = 0; i < hosts.size(); ++i)
      if (hosts[i].unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) {
        if (given[i].sizes() != t.sizes()) {
          given[i].resize_(t.sizes());
          host(given[i]).copy_(t);
        }
        return given[i];
      }
    return relabel(t, device);
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) {
      v = back(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor t : v.toTensorList()) made.push_back(back(t));
      v = made;
    }
  }
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.device() != src.device() && !non_blocking)
    wait(c10::str("a copy of ", src.sizes(), " from ", src.device(), " to ", self.device()));
  auto to = host(self);
  to.copy_(host(src));
  return self;
}

at::Scalar local_scalar(const at::Tensor& t) {
  wait("a value is read");
  return at::_local_scalar_dense(host(t));
}

at::Tensor share(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(offset);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return share(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
               offset ? offset->expect_int() : t.storage_offset());
}

at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef sizes) {
  auto size = at::infer_size(C10_AS_INTARRAYREF_SLOW(sizes), t.numel());
  auto stride = at::detail::computeStride(t.sizes(), t.strides(), size);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return share(t, size, *stride, t.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return share(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), t.storage_offset());
}

at::Tensor unfold(const at::Tensor& t, int64_t d, int64_t size, int64_t step) {
  auto h = host(t).unfold(d, size, step);
  return share(t, h.sizes(), h.strides(), t.storage_offset());
}

void resize_storage(const at::Tensor& t, int64_t bytes) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  auto data = allocator.allocate(bytes);
  if (bytes && storage->nbytes())
    std::memcpy(data.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef sizes,
                          std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  int64_t n = 1;
  for (auto s : size) n *= s;
  int64_t bytes = (n + t.storage_offset()) * t.itemsize();
  if (bytes > static_cast<int64_t>(t.storage().nbytes())) resize_storage(t, bytes);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

at::Tensor& set_storage(at::Tensor& t, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return t;
}

at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  return t;
}

at::Tensor& set_whole(at::Tensor& t, at::Storage source) {
  int64_t n = source.nbytes() / t.itemsize();
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({n});
  return t;
}

int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                         bool) {
  return 0;  // by ordinary operations
}

void record_stream(at::Tensor&, c10::Stream) {}

// Exchanges are gloo's, on the same bytes.
struct Exchange final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> inner;
  std::vector<at::Tensor> tensors;
  Exchange(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> given)
      : inner(std::move(work)), tensors(std::move(given)) {}
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  int sourceRank() const override { return inner->sourceRank(); }
  std::vector<at::Tensor> result() override { return tensors; }
  void synchronize() override { inner->wait(); }
  bool wait(std::chrono::milliseconds limit) override { return inner->wait(limit); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    inner->wait();
    auto type = c10::ListType::ofTensors();
    auto future = c10::make_intrusive<c10::ivalue::Future>(type);
    future->markCompleted(c10::IValue(tensors));
    return future;
  }
};

c10::IValue on_host(const c10::IValue& v, std::vector<at::Tensor>& given) {
  if (v.isTensor()) {
    if (v.toTensor().is_cuda()) given.push_back(v.toTensor());
    return host(v.toTensor());
  }
  if (v.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor t : v.toTensorList()) made.push_back(on_host(t, given).toTensor());
    return made;
  }
  if (v.isList() && v.toList().elementType()->kind() == c10::TypeKind::ListType) {
    c10::List<c10::List<at::Tensor>> made;
    for (const c10::IValue each : v.toList())
      made.push_back(on_host(each, given).toTensorList());
    return made;
  }
  return v;
}

void exchange(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto n = op.schema().arguments().size();
  const auto begin = stack->size() - n;
  std::vector<at::Tensor> first, rest;
  for (size_t i = begin; i < stack->size(); ++i)
    (*stack)[i] = on_host((*stack)[i], i == begin ? first : rest);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto returns = op.schema().returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) v = first.at(0);
    else if (v.isTensorList()) v = c10::IValue(first);
    else if (v.isObject() || v.isCustomClass())
      v = c10::IValue(c10::static_intrusive_pointer_cast<c10d::Work>(
          c10::make_intrusive<Exchange>(v.toCustomClass<c10d::Work>(), first)));
  }
}

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (auto name : {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_",
                    "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
                    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_",
                    "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&exchange>());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("record_stream", record_stream);
}

void set_strict(bool value) { strict = value; }

TORCH_LIBRARY(fake_cuda, m) {
  m.def("strict(bool value) -> ()", &set_strict);
  m.def("resize_storage(Tensor tensor, int bytes) -> ()", &resize_storage);
}
}  // namespace

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace c10d {
namespace {
struct FakeTimer final : Timer {  // DDP asks for one
  explicit FakeTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
}  // namespace
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeTimer);
}  // namespace c10d
