"""``ronde ship``: an export that is refused when it is wrong, signed, verified, and served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ronde.cli.answer_screen import tell
from ronde.cli.hosts import Places, SshHostOptions
from ronde.cli.options import (
    REQUIRED,
    GroupWithDefault,
    RunsOption,
    app,
    argument,
    option,
    setting,
    verb,
)
from ronde.cli.saved_run import answer_of, start_of
from ronde.cli.script import JsonOption, write_json
from ronde.cli.show import find_run
from ronde.world import ArgumentError
from ronde.world.units import format_bytes

ship = typer.Typer(
    cls=GroupWithDefault,
    help="Export a run's model, verify it, and serve it.",
    rich_markup_mode="markdown",
)
app.add_typer(ship, name="ship")

KeyOption = Annotated[Path | None, option("--key", "Public key that must have signed it.", "FILE")]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of ``ronde ship``, as the user gave them."""

    run: str | None = argument("[RUN]", "Default: the last.", default=None)
    to: Literal["onnx", "torch", "safetensors"] = setting(
        "onnx", "--to", "onnx, torch, or safetensors.", "FORMAT"
    )
    out: Path = setting(Path("bundle"), "--out", "The bundle's folder.", "DIR")
    check: Path | None = setting(
        None, "--check", "Samples: .npz with input, target, slice.", "FILE"
    )
    int8: bool = setting(False, "--int8", "Add a model in 8 bits, if it is as good.")
    max_drop: float = setting(0.5, "--max-drop", "Points of accuracy that int8 may lose.", "POINTS")
    sign: Path | None = setting(None, "--sign", "Private key of ronde ship key.", "FILE")
    serial: int = setting(1, "--serial", "Number of the bundle; older ones are refused.", "N")
    runs: RunsOption = Path("runs")
    json_file: JsonOption = None


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """The words of ``ronde ship key``."""

    private: Path = argument("PRIVATE", "New private key.")
    public: Path = argument("PUBLIC", "New public key.")


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """The options of ``ronde ship verify``, as the user gave them."""

    bundle: Path = argument("BUNDLE", "Folder of a bundle.")
    key: KeyOption = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(BundleOptions):
    """The options of ``ronde ship run``, as the user gave them."""

    port: int = setting(8080, "--port", "0: any free one.", "N")
    host: str = setting("127.0.0.1", "--host", "Address to bind.", "ADDRESS")
    int8: bool = setting(False, "--int8", "The model in 8 bits.")
    capture: Path | None = setting(None, "--capture", "Append requests to this file.", "FILE")
    sample: float = setting(0.01, "--sample", "Share of the requests to capture.", "SHARE")


@dataclass(frozen=True, kw_only=True)
class RollbackOptions(SshHostOptions):
    """The options of ``ronde ship rollback``, as the user gave them."""

    root: Path = argument("DIR", "Folder of installed bundles.")
    hosts: str | None = setting(
        None, "--hosts", "On these hosts, over ssh. DIR is a folder there.", "a,b"
    )


@dataclass(frozen=True, kw_only=True)
class InstallOptions(RollbackOptions):
    """The options of ``ronde ship install``, as the user gave them."""

    bundle: Path = argument("BUNDLE", "Folder of a bundle.")
    key: Path = setting(REQUIRED, "--key", "Public key that must have signed it.", "FILE")
    root: Path = setting(REQUIRED, "--to", "Folder of installed bundles.", "DIR")


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The options of ``ronde ship watch``, as the user gave them."""

    captures: Path = argument("FILE", "Of ronde ship run.")
    against: Path = setting(REQUIRED, "--against", "The bundle.", "BUNDLE")
    key: KeyOption = None
    json_file: JsonOption = None


@verb(ship, "export")
def _export(options: ExportOptions) -> None:
    """Export a run's model, and refuse an export that is wrong.

    The script is started up to ronde.distribute, the run's newest checkpoint is loaded, and the
    model exported. The export is compared with the model's float64 twin, sample by sample, and
    refused if it is further away than eight times the model's own rounding.

    Examples:

    ```sh
    ronde ship gpt-1 --out bundle                              ONNX, checked on training samples
    ronde ship gpt-1 --check test.npz --int8 --max-drop 0.5 --sign key.pem --out bundle
    ronde ship gpt-1 --to torch --out bundle                   or --to safetensors
    ronde ship key key.pem public.pem
    ronde ship verify bundle --key public.pem                  no torch needed
    ronde ship run bundle --port 8080
    ronde ship install bundle --key public.pem --to /srv/model --hosts edge1,edge2
    ```

    Exit status: 0 shipped, 1 refused because the export is wrong, 2 an argument cannot be used.
    """
    to, out = options.to, options.out
    if options.int8 and to != "onnx":
        raise ArgumentError("--int8 is for --to onnx.")
    if out.exists():
        raise ArgumentError(f"{out} is there already: give --out another name.")
    directory = find_run(options.runs, options.run)
    checkpoint, command, facts = start_of(directory)
    asked = {
        "checkpoint": str(checkpoint),
        "to": to,
        "out": str(out.absolute()),
        "check": options.check and str(options.check.absolute()),
        "int8": options.int8,
        "max_drop": options.max_drop / 100,
        "sign": options.sign and str(options.sign.absolute()),
        "serial": options.serial,
        "facts": facts,
    }
    values = answer_of("ship", command, asked, "exported")
    # A refusal is written, too: it has the numbers that decided.
    write_json(options.json_file, values)
    if values.get("argument"):
        raise ArgumentError(values["refused"])
    if "refused" in values:
        tell(f"refused: {values['refused']}", err=True)
        raise typer.Exit(1)
    _show(values, out)


@verb(ship, "key")
def _key(options: KeyOptions) -> None:
    """Make a pair of Ed25519 keys for ronde ship --sign."""
    from ronde.ship import make_key

    make_key(options.private, options.public)
    print(f"keys      {options.private} (keep it secret), {options.public}")


@verb(ship, "verify")
def _verify(options: BundleOptions) -> None:
    """Check a bundle's signature and digests, and run its stored samples on this device."""
    from ronde.ship import ShippedModel, verify_bundle

    bundle, key = options.bundle, options.key
    verified = verify_bundle(bundle, key)
    who = f"signed by {key}" if verified.signed else "digests only: no --key was given"
    print(f"bundle    serial {verified.serial}, {len(verified.about['files'])} files, {who}")
    if "model.onnx" in verified.about["files"]:
        worst = ShippedModel(bundle, key).check()
        print(f"samples   off by {worst:.2g} at most on this device, within the limit")


@verb(ship, "run")
def _serve(options: ServeOptions) -> None:
    """Serve a bundle's model: POST /predict, GET /health."""
    from ronde.ship import Capture, ShippedModel, serve_model

    model = ShippedModel(options.bundle, options.key, int8=options.int8)
    kept = Capture(options.capture, options.sample) if options.capture else None
    with serve_model(model, options.port, options.host, kept) as server:
        where = f"http://{options.host}:{server.server_address[1]}"
        print(f"serving   {where}/predict, serial {model.bundle.serial}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped by SIGINT")


@verb(ship, "install")
def _install(options: InstallOptions) -> None:
    """Verify a bundle, and make it the current one of a folder."""
    from ronde.ship import install_bundle, verify_bundle

    bundle, root, key = options.bundle, options.root, options.key
    if places := options.places():
        # Here first: no host gets a bundle that none would take.
        verify_bundle(bundle, key)
        _on_hosts(places, root, bundle, key)
    else:
        done = install_bundle(bundle, root, key)
        print(f"installed serial {done.serial}: {root / 'current'}")


@verb(ship, "rollback")
def _rollback(options: RollbackOptions) -> None:
    """Make the bundle before the current one current again."""
    from ronde.ship import restore_previous

    if places := options.places():
        _on_hosts(places, options.root)
    else:
        print(f"current   serial {restore_previous(options.root)}: {options.root / 'current'}")


@verb(ship, "watch")
def _watch(options: WatchOptions) -> None:
    """Compare captured requests with the samples of a bundle."""
    from ronde.ship import verify_bundle, watch_captures

    captures = options.captures
    if not captures.is_file():
        raise ArgumentError(f"{captures} is not there: ronde ship run --capture writes it.")
    with captures.open() as lines:
        values = watch_captures(verify_bundle(options.against, options.key), lines)
    write_json(options.json_file, values)
    seconds = values["seconds"]
    serials = ", ".join(f"{s} ({n})" for s, n in values["serials"].items())
    print(f"captures  {values['requests']:,} requests, {values['rows']:,} rows, serial {serials}")
    print(f"latency   median {seconds['median']:.2g} s, p99 {seconds['p99']:.2g} s")
    if values["unreadable"]:
        print(f"left out  {values['unreadable']} lines that cannot be read")
    shifted = [c for c in values["columns"] if c["shifted"]]
    for c in shifted:
        missing = f", {c['missing']:.1%} not finite" if c["missing"] else ""
        print(f"drift     {c['column']}: stability index {c['index']:.2f}{missing}")
    if not shifted:
        print(f"drift     none seen in {len(values['columns'])} columns")
    if shifted:
        raise typer.Exit(1)


def _on_hosts(
    places: Places, root: Path, bundle: Path | None = None, key: Path | None = None
) -> None:
    from ronde.cli.ship_hosts import order_hosts

    if not order_hosts(places, root, bundle, key):
        raise typer.Exit(1)


def _show(values: dict[str, Any], out: Path) -> None:
    about = values["about"]
    for i, floor in enumerate(about.get("floor", ())):
        name = "equal" if i == 0 else ""
        tell(
            f"{name:9} output {i}: worst |export - float64| {floor['export']:.2g}; the model's own "
            f"rounding {floor['model']:.2g}, limit {floor['limit']:.2g}"
        )
    checked = about["checked"]
    if "floor" in about:
        tell(f"checked   {checked['samples']} samples of {checked['on']}")
    if small := values.get("int8"):
        before, after = small["accuracy"]
        text = (
            f"accuracy {before:.1%} -> {after:.1%}; worst {small['worst'][0]}: "
            f"{small['worst'][1]:.1f} points; {small['speedup']:.2f}x as fast"
        )
        tell(f"int8      {small['refused'] or text}")
    signed = "signed" if values["signed"] else "not signed"
    files = ", ".join(f"{n} ({format_bytes(f['bytes'])})" for n, f in about["files"].items())
    tell(f"bundle    {out}, serial {about['serial']}, {signed}: {files}")
