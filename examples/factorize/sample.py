"""Write the ink in 16 fields of scikit-learn's digits, and whether the digit is odd."""

import pandas
from sklearn.datasets import load_digits

digits = load_digits()
fields = digits.images.reshape(-1, 4, 2, 4, 2).sum((2, 4)).reshape(-1, 16)
table = pandas.DataFrame(fields, columns=[f"field_{i:02}" for i in range(16)])
table["target"] = digits.target % 2
table.iloc[:1437].to_parquet("train.parquet", index=False)
table.iloc[1437:].to_parquet("valid.parquet", index=False)
