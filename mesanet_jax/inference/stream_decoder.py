"""Text from tokens that arrive one by one."""

from collections.abc import Callable, Sequence


class StreamDecoder:
    """Turns tokens into text as they arrive, and holds back what later tokens may still change.

    A token may end inside a UTF-8 character, which decodes to U+FFFD until the rest of it has arrived; such an end is
    held back. All ids are decoded each time, because tokenizers join pieces depending on their neighbours.

    Args:
      decode: the tokenizer's function from token ids to text.
      ids: tokens that come before, such as a prompt; they are context and not part of the output.
    """

    def __init__(self, decode: Callable[[list[int]], str], ids: Sequence[int] = ()):
        self._decode, self._ids = decode, list(ids)
        self._printed = len(decode(self._ids))

    def push(self, token: int) -> str:
        """The text that became certain with this token; often empty."""
        self._ids.append(token)
        return self._emit(self._decode(self._ids).rstrip("\ufffd"))

    def finish(self) -> str:
        """The text that was held back, as it is."""
        return self._emit(self._decode(self._ids))

    def _emit(self, text: str) -> str:
        new, self._printed = text[self._printed :], max(self._printed, len(text))
        return new
