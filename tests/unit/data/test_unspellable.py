"""No text yields the token that ends or begins documents, whatever that token is to the tokenizer (case W28)."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppfleetx.data import load_tokenizer
from ppfleetx.data.tokenizers import MarkChoice

END, BEGIN = "<|endoftext|>", "<|begin|>"
checked = settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))

#: random text among which the tokens are spelled, whole, broken, in other case and between spaces
spelled = st.sampled_from([END, BEGIN, END[:5], END[5:], END.upper(), f" {END} ", "</s>", "hello", "\n"])
texts = st.lists(
    st.one_of(spelled, st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=8)), max_size=8
).map("".join)


def chain(token):
    """Merges that make `token` out of its characters, from the left."""
    return [(token[:n], token[n]) for n in range(1, len(token))]


def byte_level(added=(), merged=(), **options):
    """A byte-level BPE; `added` (token, special) come after the vocabulary, `merged` tokens are made by merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    merges = list(dict.fromkeys(merge for token in merged for merge in chain(token)))
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)])
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, **options))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for token, special in added:
        backend.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    return backend


def unigram():
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), (END, -1.0), ("hello", -2.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    return backend


def whole_words(model_name, unknown):
    """WordLevel or WordPiece: `unknown` stands for what is not in the vocabulary, and text in upper case is lowered."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(["[UNK]", "hello", END, BEGIN])}
    backend = tokenizers.Tokenizer(getattr(models, model_name)(vocab, unk_token=unknown))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


BACKENDS = {
    "added": lambda: byte_level([(END, False), (BEGIN, False), ("later", True)]),
    "special": lambda: byte_level([(BEGIN, True), (END, True)]),
    "added, special, in a vocabulary": lambda: byte_level([(END, True)], [END]),
    "made by merges": lambda: byte_level(merged=[END, BEGIN, "hello"]),
    "whole words": lambda: byte_level(merged=[END], ignore_merges=True),
    "merged further": lambda: byte_level(merged=[f"{END}x"]),
    "unigram": unigram,
    "WordLevel": lambda: whole_words("WordLevel", "[UNK]"),
    "WordPiece": lambda: whole_words("WordPiece", "[UNK]"),
    "unknown text": lambda: whole_words("WordLevel", END),
}
LOSSY = ("WordLevel", "WordPiece", "unknown text")


def saved_json(backend, folder):
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="module", params=BACKENDS)
def hugging_face(request, tmp_path_factory):
    """(name, the tokenizer as ours, the same as the library's own)."""
    backend = BACKENDS[request.param]()
    path = saved_json(backend, tmp_path_factory.mktemp("hf"))
    with_bos = backend.token_to_id(BEGIN) is not None
    marks = MarkChoice(END, BEGIN, True) if with_bos else MarkChoice(END)
    return request.param, load_tokenizer(path, marks=marks), backend


@checked
@given(text=texts)
def test_text_never_yields_the_marks_of_a_hugging_face_tokenizer(hugging_face, text):
    name, tokenizer, backend = hugging_face
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eos_id == backend.token_to_id(END) not in ids
    assert tokenizer.bos is None or tokenizer.bos.id == backend.token_to_id(BEGIN) not in ids
    if name not in LOSSY:
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.eos_id, *ids, tokenizer.eos_id]) == text


def test_other_text_and_other_tokens_are_encoded_as_before(hugging_face):
    """Also ids of tokens that come after the mark."""
    name, tokenizer, backend = hugging_face
    backend.encode_special_tokens = True
    for text in ("hello", "hello hello", "<|", "x hello <|other|>", "laterx"):
        before = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_batch([text]) == [[index for index in before if index != tokenizer.eos_id]]
    # else the test above would show nothing
    assert (tokenizer.eos_id in backend.encode(END, add_special_tokens=False).ids) == (name != "special")
    assert tokenizer.vocab_size == max(backend.get_vocab().values()) + 1
    assert tokenizer.vocab() == backend.get_vocab()


def test_w28_a_document_does_not_end_in_its_middle(tmp_path):
    """Before: h e l l o, the added token, w o r l d."""
    path = saved_json(byte_level([(END, False)]), tmp_path)
    tokenizer = load_tokenizer(path)
    (ids,) = tokenizer.encode_batch([f"hello{END}world"])
    assert (tokenizer.eos_id, len(ids), 256 in ids) == (256, 10 + len(END), False)


@pytest.mark.parametrize("merged", [True, False])
def test_w28_a_gpt2_folder_whose_merges_make_the_token(tmp_path, merged):
    from tokenizers import pre_tokenizers

    merges = chain(END) if merged else []
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges), END])
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == len(tokens) - 1
    for text in (f"hello{END}world", END, END * 3):
        (ids,) = tokenizer.encode_batch([text])
        assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == text


def sentencepiece_model(tmp_path_factory, **options):
    """A model of lossless bytes whose corpus spells the tokens so often that they become pieces."""
    import sentencepiece

    model = io.BytesIO()
    fixed = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    fixed |= {"add_dummy_prefix": False, "unk_id": 0, "bos_id": -1, "eos_id": -1, "pad_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([END] * 40 + ["a b"] * 9), model_writer=model, vocab_size=285,
        hard_vocab_limit=False, split_by_unicode_script=False, **(fixed | options),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("spm") / "a.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(
    scope="module",
    params=[
        {"user_defined_symbols": [END, BEGIN], "model_type": "bpe"},
        {"user_defined_symbols": [END, BEGIN], "model_type": "unigram"},
        {"control_symbols": [BEGIN, END], "model_type": "bpe"},
        {"model_type": "bpe"},
        {"model_type": "unigram"},
    ],
    ids=["user-defined bpe", "user-defined unigram", "control", "pieces of bpe", "pieces of unigram"],
)
def sentencepiece(request, tmp_path_factory):
    path = sentencepiece_model(tmp_path_factory, **request.param)
    import sentencepiece

    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    with_bos = own.piece_to_id(BEGIN) != 0
    return load_tokenizer(path, marks=MarkChoice(END, BEGIN if with_bos else None, with_bos)), own, request.param


@checked
@given(text=texts)
def test_text_never_yields_the_marks_of_a_sentencepiece_model(sentencepiece, text):
    tokenizer, own, _ = sentencepiece
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eos_id == own.piece_to_id(END) not in ids
    assert tokenizer.bos is None or tokenizer.bos.id == own.piece_to_id(BEGIN) not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


def test_the_models_gave_that_id_to_text_before(sentencepiece):
    """Else the test above would show nothing; of the other pieces nothing changes."""
    tokenizer, own, kind = sentencepiece
    assert (own.piece_to_id(END) in own.encode(END)) == ("control_symbols" not in kind)
    assert tokenizer.encode_batch(["ab<>|"]) == [own.encode("ab<>|")]


def test_a_mark_that_stands_for_unknown_text_leaves_it_out_and_says_so(tmp_path, caplog):
    """Before: every unknown word ended the document."""
    tokenizer = load_tokenizer(saved_json(BACKENDS["unknown text"](), tmp_path), marks=MarkChoice(END))
    assert tokenizer.encode_batch(["hello", "hello hello"]) == [[1], [1, 1]] and not caplog.text
    assert tokenizer.encode_batch(["hello there hello", "no"]) == [[1, 1], []]
    assert caplog.text.count(f"{END} stands for unknown text too") == 1


@pytest.mark.parametrize("token", ["!", "Ġ"])
def test_a_token_that_text_needs_cannot_end_documents(tmp_path, token):
    from ppfleetx.config.errors import UserError

    path = saved_json(byte_level([(END, True)]), tmp_path)
    with pytest.raises(UserError, match="must be none that text is spelled with") as caught:
        load_tokenizer(path, marks=MarkChoice(token))
    assert "--eos-token" in caught.value.problems[0].fix
