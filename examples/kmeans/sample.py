"""Write what chemists measured of scikit-learn's wines as train.parquet."""

from sklearn.datasets import load_wine

load_wine(as_frame=True).data.to_parquet("train.parquet", index=False)
