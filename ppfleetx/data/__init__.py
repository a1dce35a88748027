"""The data room: token corpora, the order of samples, batches, tokenizers. Imports no Paddle."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppfleetx.data.corpus import Corpus, open_corpus
    from ppfleetx.data.dataset import DatasetSpec, GPTDataset, Sample
    from ppfleetx.data.documents import Reading
    from ppfleetx.data.loader import Batch, load_batches
    from ppfleetx.data.order import KeyedPermutation, SampleOrder, split_documents
    from ppfleetx.data.preprocess import PreprocessJob, PreprocessSummary, preprocess_corpus
    from ppfleetx.data.sampler import GlobalBatchSampler
    from ppfleetx.data.token_writer import CorpusWriter
    from ppfleetx.data.tokenizers import MarkChoice, Tokenizer, load_tokenizer
    from ppfleetx.data.train_tokenizer import train_sentencepiece

#: public name -> module that holds it; loaded on first use (PEP 562), so that reading a corpus loads no tokenizer
_MODULE_OF = {
    "Corpus": "corpus",
    "open_corpus": "corpus",
    "DatasetSpec": "dataset",
    "GPTDataset": "dataset",
    "Sample": "dataset",
    "Batch": "loader",
    "load_batches": "loader",
    "KeyedPermutation": "order",
    "SampleOrder": "order",
    "split_documents": "order",
    "Reading": "documents",
    "PreprocessJob": "preprocess",
    "PreprocessSummary": "preprocess",
    "preprocess_corpus": "preprocess",
    "GlobalBatchSampler": "sampler",
    "CorpusWriter": "token_writer",
    "Tokenizer": "tokenizers",
    "MarkChoice": "tokenizers",
    "load_tokenizer": "tokenizers",
    "train_sentencepiece": "train_tokenizer",
}

__all__ = [
    "Batch",
    "Corpus",
    "CorpusWriter",
    "DatasetSpec",
    "GPTDataset",
    "GlobalBatchSampler",
    "KeyedPermutation",
    "MarkChoice",
    "PreprocessJob",
    "PreprocessSummary",
    "Reading",
    "Sample",
    "SampleOrder",
    "Tokenizer",
    "load_batches",
    "load_tokenizer",
    "open_corpus",
    "preprocess_corpus",
    "split_documents",
    "train_sentencepiece",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
