"""A GGUF model in llama.cpp: its weights and its vocabulary. Decides which kinds of models are taken."""

import ctypes
import logging
import operator
import threading
from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_char_p, c_int32
from functools import cache
from pathlib import Path
from typing import Any, Self, SupportsIndex

from kvtier_core import ClosedError, ConfigError, UnsupportedModelError
from kvtier_llamacpp.binding import (
    GGUF_STRING,
    GGUF_UINT32,
    LOAD_INTO_MEMORY,
    LOG_CALLBACK,
    MOST_LAYERS,
    ChatMessage,
    GGUFParams,
    library,
)
from kvtier_llamacpp.errors import LlamaError
from kvtier_llamacpp.namespace import model_files
from kvtier_weights import look_at_file

_log = logging.getLogger("kvtier.llamacpp")
_ERROR = 4
"""``GGML_LOG_LEVEL_ERROR``; what goes on with a line before has 5."""


class LoadedModel:
    """A model in a library of llama.cpp, loaded by whoever gives its handle."""

    def __init__(self, lib: Any, path: Path) -> None:
        """Look at the files of the model at *path*, before they are loaded. Raises as ``model_files`` does."""
        self.lib = lib
        self.path = path
        self.files = model_files(path)
        self._seen = [look_at_file(file) for file in self.files]
        self.handle: Any = None
        self._vocab: Any = None

    def take(self, handle: Any) -> None:
        """The model is loaded. Raises ``UnsupportedModelError`` for one of a kind that is not served."""
        self.handle = handle
        self._vocab = self.lib.llama_model_get_vocab(handle)
        self.vocab_size: int = self.lib.llama_vocab_n_tokens(self._vocab)
        self.trained_tokens: int = self.lib.llama_model_n_ctx_train(handle)
        self._check_kind()
        self.has_kv: bool = not self.lib.llama_model_is_recurrent(handle)
        """Whether it has layers of attention."""
        self.has_state: bool = not self.has_kv or self.lib.llama_model_is_hybrid(handle)
        """Whether it has layers that keep one state, however many tokens came before."""

    def _check_kind(self) -> None:
        kinds = {
            "is a diffusion model": self.lib.llama_model_is_diffusion,
            "has an encoder": self.lib.llama_model_has_encoder,
        }
        for kind, is_of_it in kinds.items():
            if is_of_it(self.handle):
                raise UnsupportedModelError(
                    f"{self.path} ({self.description}) {kind}: kvtier-llamacpp serves decoders alone"
                )

    @property
    def description(self) -> str:
        """What llama.cpp calls the model: architecture, size, quantization."""
        text = ctypes.create_string_buffer(128)
        self.lib.llama_model_desc(self.handle, text, len(text))
        return text.value.decode(errors="replace")

    def read_number(self, name: bytes) -> int | None:
        """What the file says of the model's architecture under *name*; ``None`` where that is nothing."""
        architecture = self._read_text(b"general.architecture") or b""
        text = self._read_text(architecture + b"." + name)
        return int(text) if text is not None and text.isdigit() else None

    def _read_text(self, key: bytes) -> bytes | None:
        text = ctypes.create_string_buffer(128)
        size = self.lib.llama_model_meta_val_str(self.handle, key, text, len(text))
        return text.value if size >= 0 else None

    def check_unchanged(self) -> None:
        """Raise ``LlamaError`` if a file is no longer what was loaded."""
        if self._seen != [look_at_file(file) for file in self.files]:
            raise LlamaError(
                f"{self.path}: the file changed while it was opened, so what was loaded may be other weights than "
                "those that were read for their name: open it again"
            )


class Model(LoadedModel):
    """A model of our own. Its vocabulary may be used by any thread. ``close`` gives the memory back."""

    def __init__(self, path: Path) -> None:
        """Load the GGUF file *path*, or all parts of which it is the first.

        Raises ``ConfigError`` for what llama.cpp can't load, ``UnsupportedModelError`` for a model of a kind
        that is not served, and as ``library`` does.
        """
        super().__init__(library(), path)
        _log_errors_alone()
        self._has_vocab = threading.Lock()
        """Held by whoever reads the vocabulary, and by ``close``."""
        try:
            self._check_layers()
            self.take(self._load())
        except BaseException:
            self.close()
            raise

    def _check_layers(self) -> None:
        """Refuse a number of layers on which llama.cpp would end the whole process.

        Everything else that may be wrong with a file, it refuses itself.
        """
        file = self.lib.gguf_init_from_file(str(self.path).encode(), GGUFParams(no_alloc=True))
        if not file:
            return
        try:
            architecture = self.lib.gguf_find_key(file, b"general.architecture")
            if architecture < 0 or self.lib.gguf_get_kv_type(file, architecture) != GGUF_STRING:
                return
            name = self.lib.gguf_get_val_str(file, architecture) + b".block_count"
            count = self.lib.gguf_find_key(file, name)
            if count < 0 or self.lib.gguf_get_kv_type(file, count) != GGUF_UINT32:
                return
            layers = self.lib.gguf_get_val_u32(file, count)
        finally:
            self.lib.gguf_free(file)
        if not 1 <= layers <= MOST_LAYERS:
            raise ConfigError(
                f"{self.path}: it says that the model has {layers} layers, and llama.cpp takes 1 to {MOST_LAYERS}: the "
                "file is damaged, get it again"
            )

    def _load(self) -> Any:
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = LOAD_INTO_MEMORY  # a mapped file that is written to changes the weights in use
        model = self.lib.llama_model_load_from_file(str(self.path).encode(), params)
        if not model:
            raise ConfigError(
                f"{self.path}: llama.cpp can't load it: give a GGUF file of a model that this build knows (more in the "
                "log)"
            )
        return model

    # -- tokens

    def tokenize(self, text: str) -> list[int]:
        """The tokens of *text*, with those that the model wants around it. Markers of roles in it count as such."""
        data = _utf8(text)
        room = len(data) + 16
        tokens = (c_int32 * room)()
        with self._has_vocab:
            self._check_open()
            count = self.lib.llama_tokenize(self._vocab, data, len(data), tokens, room, True, True)
        if count < 0:
            raise LlamaError(f"llama.cpp can't tokenize a text of {len(data)} bytes")
        return list(tokens[:count])

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation whose next words are the assistant's. A message has ``role`` and ``content``.

        Raises ``UnsupportedModelError`` when the model has no chat template, or one that llama.cpp does not know.
        """
        data = [(_utf8(message["role"]), _utf8(message["content"])) for message in messages]
        if any(b"\0" in text for pair in data for text in pair):
            raise LlamaError("a message has a zero byte, at which llama.cpp would end it")
        chat = (ChatMessage * len(data))(*(ChatMessage(*pair) for pair in data))
        room = 256 + 2 * sum(len(text) + 32 for pair in data for text in pair)
        with self._has_vocab:
            self._check_open()
            template = self.lib.llama_model_chat_template(self.handle, None)
            if template is None:
                raise UnsupportedModelError(f"{self.path} has no chat template: give whole prompts")
            while True:
                text = ctypes.create_string_buffer(room)
                size = self.lib.llama_chat_apply_template(template, chat, len(data), True, text, room)
                if size <= room:
                    break
                room = size
        if size < 0:
            raise UnsupportedModelError(
                f"{self.path} has a chat template that llama.cpp does not know: give whole prompts"
            )
        return self.tokenize(text.raw[:size].decode(errors="replace"))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of *token_ids*, without special tokens."""
        token_ids = self.check_tokens(token_ids)
        tokens = (c_int32 * len(token_ids))(*token_ids)
        room = 64 * (len(token_ids) + 1)
        with self._has_vocab:
            self._check_open()
            while True:
                text = ctypes.create_string_buffer(room)
                count = self.lib.llama_detokenize(
                    self._vocab, tokens, len(token_ids), ctypes.cast(text, c_char_p), room, True, False
                )
                if count >= 0:
                    return text.raw[:count].decode(errors="replace")
                room = -count

    def check_tokens(self, token_ids: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """*token_ids* as whole numbers. Raises ``LlamaError`` for one that the model does not know.

        llama.cpp itself would end the process.
        """
        try:
            found = tuple(map(operator.index, token_ids))
        except TypeError:
            raise LlamaError("a prompt is a sequence of token ids: whole numbers") from None
        unknown = next((token for token in found if not 0 <= token < self.vocab_size), None)
        if unknown is not None:
            raise LlamaError(f"the model has no token {unknown}: it knows 0 to {self.vocab_size - 1}")
        return found

    def is_end(self, token_id: int) -> bool:
        """Whether the model ends its answer by this token."""
        return bool(self.lib.llama_vocab_is_eog(self._vocab, token_id))

    def _check_open(self) -> None:
        if self.handle is None:
            raise ClosedError("the model was closed")

    def close(self) -> None:
        """Give the memory back. Calling it twice is fine. Every context of the model was closed before."""
        with self._has_vocab:
            if self.handle:
                self.lib.llama_model_free(self.handle)
            self.handle = self._vocab = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise LlamaError(f"the text has half a surrogate pair at character {error.start + 1}") from None


def _log_error(level: int, text: bytes, _: object) -> None:
    if level == _ERROR and text.strip():
        _log.warning("llama.cpp: %s", text.decode(errors="replace").strip())


@cache
def _log_errors_alone() -> object:
    """llama.cpp writes hundreds of lines to stderr while it loads a model; its errors go to the log.

    Returns what must live as long as the library may call it: the cache keeps it.
    """
    callback = LOG_CALLBACK(_log_error)
    library().llama_log_set(callback, None)
    return callback
