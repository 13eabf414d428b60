"""Write matplotlib's monthly stock prices as train.parquet: series, time, value."""

import pandas
from matplotlib.cbook import get_sample_data

prices = pandas.read_csv(get_sample_data("Stocks.csv"), comment="#")
prices = prices.rename(columns={"Date": "time"})
table = prices.melt("time", var_name="series", value_name="value").dropna()
table.to_parquet("train.parquet", index=False)
