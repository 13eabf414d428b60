"""Write scikit-learn's breast cancer data as train.parquet and valid.parquet."""

from sklearn.datasets import load_breast_cancer

table = load_breast_cancer(as_frame=True).frame.sample(frac=1, random_state=0)
table.columns = [name.replace(" ", "_") for name in table.columns]
table.iloc[:456].to_parquet("train.parquet", index=False)
table.iloc[456:].to_parquet("valid.parquet", index=False)
