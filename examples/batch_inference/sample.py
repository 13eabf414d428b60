"""Write scikit-learn's handwritten digits as rows.parquet."""

import pyarrow
import pyarrow.parquet
from sklearn.datasets import load_digits

digits = load_digits()
table = pyarrow.table({"image": (digits.data / 16).tolist(), "label": digits.target})
pyarrow.parquet.write_table(table, "rows.parquet")
