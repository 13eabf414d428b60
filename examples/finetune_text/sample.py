"""Write small data and a small model: train.parquet, valid.parquet, and small/, a random BERT.

The texts are the paragraphs of the documentation strings of four packages of Python's standard
library; the label is the package.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import pandas
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
args = parser.parse_args()
PACKAGES = ("asyncio", "email", "tkinter", "unittest")


def paragraphs(package):
    for file in sorted(Path(sysconfig.get_paths()["stdlib"], package).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                for text in (ast.get_docstring(node) or "").split("\n\n"):
                    if len(text.split()) > 6:
                        yield {"text": " ".join(text.split()), "label": package}


rows = pandas.DataFrame(row for name in PACKAGES for row in list(paragraphs(name))[:300])
rows = rows.sample(frac=1, random_state=0)
cut = len(rows) * 4 // 5
rows[:cut].to_parquet("train.parquet", index=False)
rows[cut:].to_parquet("valid.parquet", index=False)

words = BertWordPieceTokenizer()
words.train_from_iterator(rows[:cut]["text"], vocab_size=3000, show_progress=False)
tokenizer = BertTokenizerFast(tokenizer_object=words._tokenizer, model_max_length=128)
tokenizer.save_pretrained("small")
config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=args.width, num_hidden_layers=args.layers,
    num_attention_heads=args.heads, intermediate_size=4 * args.width, max_position_embeddings=128,
)  # fmt: skip
BertForMaskedLM(config).save_pretrained("small")
