"""Write the pixels of scikit-learn's handwritten digits as train.parquet."""

from sklearn.datasets import load_digits

load_digits(as_frame=True).data.to_parquet("train.parquet", index=False)
