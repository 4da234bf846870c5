"""Stage 2 of the answer checker: the parser's place in the tokens. Looking, stepping over, going one level deeper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nano_exgrpo.checker.lexer import Token
from nano_exgrpo.checker.tree import Node

MAX_TOKENS = 1_500
MAX_DEPTH = 30  # of nested brackets and arguments


class ParseError(ValueError):
    """The text is not, as a whole, an answer that the grammar knows."""


@dataclass
class Cursor:
    """Where a parser is. The rules of the grammar build on it: `commands`, `expressions`, `latex`, one class each."""

    tokens: list[Token]
    at: int = 0
    depth: int = 0
    bars: int = 0  # open absolute values: inside them "|" closes
    stop: list[str] = field(default_factory=list)
    not_calls: set[int] = field(default_factory=set)  # parentheses tried as arguments and found to be a factor
    may_close: bool = False  # in a tuple after a comma, where "[" may close an interval written as ]0, 1[

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def sign(self) -> str:
        """The current token if it is a sign, a command or the end, else ""."""
        kind, text, *_ = self.tokens[self.at]
        return text if kind == "op" else "end" if kind == "end" else ""

    def command(self) -> str:
        token = self.tokens[self.at]
        return token.text if token.kind == "cmd" else ""

    def accept(self, *signs: str) -> str:
        """Step over one of `signs` and return it, or return ""."""
        sign = self.sign()
        if sign in signs:
            self.at += 1
            return sign
        return ""

    def words(self, *words: str) -> bool:
        """Step over one of `words`, if it stands here."""
        found = self.token.kind in ("text", "word") and self.token.text in words
        self.at += found
        return found

    def expect(self, *signs: str) -> str:
        found = self.accept(*signs)
        if not found:
            raise ParseError(f"expected {' or '.join(signs)}, found {self.token.text or 'the end'!r}")
        return found

    def nested(self, rule: Callable[[], Node], bars: int = 0):
        """Run a rule one level deeper, with `bars` open absolute values."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError(f"nested deeper than {MAX_DEPTH}")
        outer = self.bars, self.may_close
        self.bars, self.may_close = bars, False
        node = rule()
        self.bars, self.may_close = outer
        self.depth -= 1
        return node
