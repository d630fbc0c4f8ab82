"""The tokenizer inside a GGUF file, as the files of an ordinary tokenizer folder.

Two kinds of vocabulary occur in the Llama family: byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``) and
SentencePiece BPE with byte fallback (``llama``).
"""

from __future__ import annotations

from typing import Any

from .errors import ModelError
from .gguf_file import GGUFFile

MAX_TOKEN_CHARACTERS = 1024

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?(?:[{_UPPER}]*[{_LOWER}]+|[{_UPPER}]+[{_LOWER}]*)"

_GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _regex_split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _GPT2_SPLIT | {"use_regex": False}]


_LLAMA3 = _regex_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}")
_QWEN2 = _regex_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}")
_TEKKEN = _regex_split(rf"{_CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_SMOLLM = [_DIGITS, _GPT2_SPLIT]

PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": [_GPT2_SPLIT],
    "gpt-2": [_GPT2_SPLIT],
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_ADDS_BOS = ("llama-bpe", "llama-v3", "llama3", "tekken")

_END_OF_TURN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_OF_TURN_TEXTS = frozenset("</s> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|>".split())


class GGUFTokenizer:
    """The tokenizer of a GGUF file.

    Attributes:
        tokenizer_json, tokenizer_config: the content of the two files of those names.
        chat_template: Jinja text, or None.
        bos_id, eos_ids: the token that starts a text, or None; the tokens that end an answer.

    Raises:
        ModelError: a key is missing or of another type, or the vocabulary, merges and ids do not fit together.
    """

    def __init__(self, file: GGUFFile, vocab_size: int) -> None:
        self._file = file
        self._kind = file.value("tokenizer.ggml.model", str)
        if self._kind not in ("gpt2", "llama"):
            raise ModelError(file.path, f"tokenizer.ggml.model is {self._kind!r}; gpt2 and llama are supported")
        self._tokens = self._read_tokens(vocab_size)
        self._types = self._read_types()
        self._vocab = {token: index for index, token in enumerate(self._tokens)}
        if len(self._vocab) != len(self._tokens):
            raise ModelError(file.path, "tokenizer.ggml.tokens holds the same token twice")
        self.bos_id = self._token_id("bos_token_id")
        self.eos_ids = self._read_eos_ids()
        self.chat_template = file.value("tokenizer.chat_template", str, "") or None
        self.tokenizer_json = self._build()
        self.tokenizer_config = self._build_config()

    def _list(self, key: str, element: type) -> list[Any]:
        values = self._file.value(key, list)
        if any(type(value) is not element for value in values):
            raise ModelError(self._file.path, f"metadata key {key} must be an array of {element.__name__}")
        return values

    def _read_tokens(self, vocab_size: int) -> list[str]:
        tokens = self._list("tokenizer.ggml.tokens", str)
        if not 0 < len(tokens) <= vocab_size:
            raise ModelError(
                self._file.path, f"tokenizer.ggml.tokens has {len(tokens)} tokens; the embedding has {vocab_size} rows"
            )
        longest = max(map(len, tokens))
        if longest > MAX_TOKEN_CHARACTERS:
            raise ModelError(
                self._file.path,
                f"tokenizer.ggml.tokens has a token of {longest} characters; "
                f"at most {MAX_TOKEN_CHARACTERS} are allowed",
            )
        return tokens

    def _read_types(self) -> list[int]:
        if "tokenizer.ggml.token_type" not in self._file.metadata:
            return [1] * len(self._tokens)
        types = self._list("tokenizer.ggml.token_type", int)
        self._same_length("tokenizer.ggml.token_type", types)
        return types

    def _same_length(self, key: str, values: list[Any]) -> None:
        if len(values) != len(self._tokens):
            raise ModelError(self._file.path, f"{key} has {len(values)} elements for {len(self._tokens)} tokens")

    def _token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}"
        if key not in self._file.metadata:
            return None
        token = self._file.value(key, int, low=0)
        if token >= len(self._tokens):
            raise ModelError(self._file.path, f"{key} is {token}; the vocabulary has {len(self._tokens)} tokens")
        return token

    def _read_eos_ids(self) -> list[int]:
        named = [self._token_id(key) for key in _END_OF_TURN_KEYS]
        known = [
            index
            for index, (token, kind) in enumerate(zip(self._tokens, self._types))
            if kind == _CONTROL and token in _END_OF_TURN_TEXTS
        ]
        return list(dict.fromkeys([index for index in named if index is not None] + known))

    def _build(self) -> dict[str, Any]:
        parts = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        added = [
            {
                "id": index,
                "content": self._tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for index, kind in enumerate(self._types)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and self._tokens[index]
        ]
        post = {"post_processor": self._post_processor()}
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | post | parts

    def _model(self, **extra: Any) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": self._vocab,
        } | extra

    def _byte_level(self) -> dict[str, Any]:
        pre = self._file.value("tokenizer.ggml.pre", str, "default")
        if pre not in PRE_TOKENIZERS:
            raise ModelError(
                self._file.path, f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        return {
            "normalizer": {"type": "NFC"} if PRE_TOKENIZERS[pre] is _QWEN2 else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": self._model(merges=self._stored_merges(), ignore_merges=PRE_TOKENIZERS[pre] in (_LLAMA3, _TEKKEN)),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        prefix = self._file.value("tokenizer.ggml.add_space_prefix", bool, True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        normalizers = [{"type": "Prepend", "prepend": "▁"}] * prefix + [replace]
        decoders = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
        stored = "tokenizer.ggml.merges" in self._file.metadata
        unknown = self._token_id("unknown_token_id")
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._model(
                merges=self._stored_merges() if stored else self._merges_from_scores(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            ),
        }

    def _stored_merges(self) -> list[list[str]]:
        merges = [merge.split(" ") for merge in self._list("tokenizer.ggml.merges", str)]
        for index, pair in enumerate(merges):
            if len(pair) != 2 or any(token not in self._vocab for token in (*pair, "".join(pair))):
                raise ModelError(
                    self._file.path,
                    f"element {index} of tokenizer.ggml.merges must be two tokens whose union is a token",
                )
        return merges

    def _merges_from_scores(self) -> list[list[str]]:
        """SentencePiece stores no merges: a pair merges when its union is a token, the best score first."""
        scores = self._list("tokenizer.ggml.scores", float)
        self._same_length("tokenizer.ggml.scores", scores)
        ranked = [
            (-score, self._vocab[token[:cut]], self._vocab[token[cut:]])
            for token, score in zip(self._tokens, scores)
            for cut in range(1, len(token))
            if token[:cut] in self._vocab and token[cut:] in self._vocab
        ]
        return [[self._tokens[left], self._tokens[right]] for _, left, right in sorted(ranked)]

    def _post_processor(self) -> dict[str, Any] | None:
        pre = self._file.value("tokenizer.ggml.pre", str, "default")
        first = self._file.value("tokenizer.ggml.add_bos_token", bool, self._kind == "llama" or pre in _ADDS_BOS)
        last = self._file.value("tokenizer.ggml.add_eos_token", bool, False)
        start = [self.bos_id] if first and self.bos_id is not None else []
        end = self.eos_ids[:1] if last else []
        if not start + end:
            return None

        def template(*sequences: str) -> list[dict[str, Any]]:
            special = lambda index: {"SpecialToken": {"id": self._tokens[index], "type_id": 0}}  # noqa: E731
            pieces = []
            for number, sequence in enumerate(sequences):
                inner = {"Sequence": {"id": sequence, "type_id": number}}
                pieces += [*map(special, start), inner, *map(special, end)]
            return pieces

        tokens = {
            self._tokens[index]: {"id": self._tokens[index], "ids": [index], "tokens": [self._tokens[index]]}
            for index in start + end
        }
        return {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("A", "B"),
            "special_tokens": tokens,
        }

    def _build_config(self) -> dict[str, Any]:
        ids = {
            "bos_token": self.bos_id,
            "eos_token": self.eos_ids[0] if self.eos_ids else None,
            "unk_token": self._token_id("unknown_token_id"),
            "pad_token": self._token_id("padding_token_id"),
        }
        named = {name: self._tokens[index] for name, index in ids.items() if index is not None}
        return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | named
