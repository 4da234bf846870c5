"""Stage 2 of the answer checker, second third: expressions, by recursive descent.

    sum       := product (("+" | "-" | "pm" | "mp") product)* ("over" sum)?
    product   := signed (("*" | "/" | "mod")? signed)*                       an absent sign is a product
    signed    := ("+" | "-" | "pm" | "mp")* power
    power     := atom suffix* ("^" exponent)*
    suffix    := "!" | "!!" | "%" | "deg" | "'" | "_" subscript
    atom      := number | mixed number | symbol | call | constant | command | group | tuple | interval | set
               | absolute value | floor | ceiling | matrix

Each rule is one method of `ExpressionParser`, in this order; the commands among the atoms are rules of `commands`,
the containers among them rules of `latex`, the last third. Nothing is evaluated here: no power, no factorial.
"""

from __future__ import annotations

from fractions import Fraction

from nano_exgrpo.checker.commands import CommandParser, times
from nano_exgrpo.checker.cursor import MAX_TOKENS, ParseError
from nano_exgrpo.checker.lexer import Token, split_word
from nano_exgrpo.checker.tree import TRANSPOSED, Based, Node, Num, Op, Seq, Sym

CALLED = set("fghFG")  # letters that name functions: f(x) is never f times x
BASE_WORDS = dict(
    two="2",
    three="3",
    four="4",
    five="5",
    six="6",
    seven="7",
    eight="8",
    nine="9",
    ten="10",
    eleven="11",
    twelve="12",
    sixteen="16",
)


class ExpressionParser(CommandParser):
    """Rules for expressions. `latex.Parser` adds those they refer to: answer, clause, bracket, braces, label,
    environment, unit, qualifier_ahead."""

    # -- arithmetic

    def sum(self) -> Node:
        node = self.product()
        while sign := self.accept("+", "-", "pm", "mp"):
            term = self.product()
            if sign != "+":
                term = Op({"-": "neg"}.get(sign, sign), (term,))
            node = Op("+", (*node.args, term) if isinstance(node, Op) and node.head == "+" else (node, term))
        if self.command() == "over":  # {1 \over 3}, 1\over3
            self.at += 1
            node = Op("/", (node, self.nested(self.sum, self.bars)))
        return node

    def product(self) -> Node:
        node = self.signed()
        while True:
            before = self.tokens[self.at - 1]
            sign = self.accept("*", "/")
            if sign:
                factor = self.signed()
                node = times(node, factor) if sign == "*" else Op("/", (node, factor))
            elif self.command() in ("bmod", "mod"):
                self.at += 1
                node = Op("mod", (node, self.signed()))
            elif self.starts_atom():
                if before.kind == "num" and self.token.kind == "num":
                    raise ParseError("two numbers side by side")
                if before.kind == "op" and before.text in ("%", "deg") and self.token.kind == "num":
                    raise ParseError("a number after a percent or degree sign")
                node = times(node, self.power())
            else:
                return node

    def starts_atom(self) -> bool:
        """Whether a factor with no sign before it can start here."""
        kind, text, *_ = self.token
        if kind in ("word", "roman") or text == "\\mu":
            return not self.unit_ahead()
        if kind in ("num", "name"):
            return True
        if kind == "cmd":
            if text in ("min", "sec") and self.unit_ahead():
                return False
            return not text.startswith("end") and text not in ("choose", "pmod", "bmod", "mod", "over")
        if text == "(" and (self.tokens[self.at + 1].text == "mod" or self.qualifier_ahead(self.at + 1)):
            return False
        if text in ("(", "[") and self.unit_ahead():
            return False
        if kind == "op":
            if text == "|":
                return not self.bars
            return text in ("(", "{", "lfloor", "lceil") or text == "[" and not self.may_close
        return False

    def unit_ahead(self) -> bool:
        at = self.at
        found = self.tokens[at - 1].text not in ("*", "/") and self.unit() is not None
        self.at = at
        return found

    def signed(self) -> Node:
        if sign := self.accept("+", "-", "pm", "mp"):
            node = self.nested(self.signed)
            return node if sign == "+" else Op({"-": "neg"}.get(sign, sign), (node,))
        return self.power()

    def power(self) -> Node:
        base = self.suffixes(self.atom())
        while self.accept("^"):
            if self.sign() == "'" or self.token.text == "*":
                mark = self.token.text
                self.at += 1
                base = self.marked(base, mark)
                continue
            exponent = self.exponent()
            if isinstance(exponent, Sym) and exponent.name.strip("'") == "":
                base = self.marked(base, exponent.name)
                base = self.call(base)
            elif exponent in TRANSPOSED and isinstance(base, Seq) and base.kind == "tuple":
                base = transposed(base)
            else:
                if isinstance(base, Sym) and self.sign() == "_":  # x^2_1 is x_1^2
                    base = self.subscript(base)
                base = Op("^", (base, exponent))
            base = self.suffixes(base)
        return base

    def exponent(self) -> Node:
        if self.accept("top"):
            return Sym("\\top")
        if self.sign() in ("+", "-", "pm", "mp"):
            return self.nested(self.signed)
        exponent = self.argument(whole_number=True)
        if self.accept("^"):  # 2**3**2
            exponent = Op("^", (exponent, self.nested(self.exponent)))
        return exponent

    def argument(self, whole_number: bool = False) -> Node:
        """A TeX argument: `{...}`, or one token (of a numeral one digit, unless `whole_number`)."""
        if self.accept("{"):
            if self.sign() == "'":
                marks = ""
                while mark := self.accept("'"):
                    marks += mark
                self.expect("}")
                return Sym(marks)
            node = self.nested(self.answer)
            self.expect("}")
            return node
        if self.token.kind == "word":
            self.split()
        token = self.token
        if token.kind == "num" and not whole_number and token.text.isdigit() and len(token.text) > 1:
            parts = token.text[0], token.text[1:]
            self.tokens[self.at : self.at + 1] = [Token("num", digits, Fraction(int(digits))) for digits in parts]
            self.at += 1
            return Num(Fraction(int(parts[0])))
        if token.kind == "num":  # never the whole of a mixed number: 10^2\frac12
            self.at += 1
            return Num(token.value, token.digits)
        return self.nested(self.atom)

    def suffixes(self, node: Node) -> Node:
        while True:
            if self.accept("!"):
                node = Op("factorial2" if self.accept("!") else "factorial", (node,))
            elif self.accept("%"):
                node = Op("percent", (node,))
            elif self.sign() == "deg" and self.tokens[self.at + 1].text in ("C", "F"):
                return node  # a unit
            elif self.accept("deg"):
                node = Op("degree", (node,))
            elif self.accept("'"):
                node = self.call(self.marked(node, "'"))
            elif self.sign() == "_":
                node = self.subscript(node)
            else:
                return node

    def marked(self, base: Node, mark: str) -> Node:
        if isinstance(base, Sym):
            return Sym(base.name + mark)
        return Op("call", ("prime" + mark, base))

    def subscript(self, node: Node) -> Node:
        self.expect("_")
        if isinstance(node, Num) and node.digits == 0:
            numeral = self.tokens[self.at - (3 if self.tokens[self.at - 2].text == ")" else 2)]
            return Based(numeral.text, self.base())
        if not isinstance(node, Sym):
            raise ParseError("a subscript on something that is not a symbol")
        if self.token.kind == "text":
            self.at += 1
            return self.call(Sym(f"{node.name}_{self.tokens[self.at - 1].text}"))
        start, words = self.at + 1, []
        if self.accept("{"):  # x_{max}, a_{ij}, v_{+}: part of the name
            while (
                self.token.kind in ("text", "word", "roman", "name", "num", "cmd")
                or self.sign() == ","
                or (not words and self.sign() in ("+", "-", "*"))
            ):
                words.append(self.token.text)
                self.at += 1
            single = self.at == start + 1 and self.tokens[start].kind in ("name", "num", "roman")
            if words and not single and self.accept("}"):
                return self.call(Sym(f"{node.name}_{''.join(words)}"))
            self.at = start - 1
        return self.call(Op("sub", (node, self.argument(whole_number=True))))  # a_n, a_{n+1}: a function of n

    def base(self) -> str:
        braced = self.accept("{")
        self.words("base")
        inner = braced and self.accept("(")
        token = self.token
        self.at += token.kind != "end"
        if inner:
            self.expect(")")
        if braced:
            self.expect("}")
        base = BASE_WORDS.get(token.text, token.text)
        if not base.isdigit():
            raise ParseError(f"unknown base {token.text!r}")
        return base

    # -- atoms

    def atom(self) -> Node:
        token = self.token
        kind, text = token.kind, token.text
        if kind == "num":
            self.at += 1
            return self.number(token)
        if kind == "word":
            self.split()
            return self.atom()
        if kind in ("name", "roman"):
            self.at += 1
            if text == "e":
                return Op("e")
            if text in ("i", "\\imath"):
                return Op("i")
            return self.call(Sym(text))
        if kind == "text":
            return self.label()
        if kind == "based":
            self.at += 1
            return Based(*text.split("_"))
        if kind == "cmd":
            return self.from_command(text)
        if kind == "op":
            if text in ("(", "[", "]"):
                return self.nested(self.bracket)
            if text == "{":
                self.at += 1
                node = self.nested(self.answer)
                if self.command() == "choose":
                    self.at += 1
                    node = Op("binom", (node, self.nested(self.sum)))
                self.expect("}")
                return Seq("set", node.items) if isinstance(node, Seq) and node.kind == "list" else node
            if text == r"\{":
                return self.nested(self.braces)
            if text == "|":
                return self.absolute()
            if text in ("lfloor", "lceil"):
                self.at += 1
                node = self.nested(self.sum)
                self.expect("r" + text[1:])
                return Op(text[1:], (node,))
        raise ParseError(f"unexpected {text or 'end'!r}")

    def absolute(self) -> Node:
        self.expect("|")
        doubled = self.accept("|")
        node = self.nested(self.sum, bars=1)
        self.expect("|")
        if doubled:
            self.expect("|")
        return Op("abs", (node,))

    def split(self) -> None:
        """Replace a run of bare letters by its letters and the functions in it: `xsin` -> x, sin."""
        self.tokens[self.at : self.at + 1] = split_word(self.token.text)
        if len(self.tokens) > MAX_TOKENS:
            raise ParseError(f"longer than {MAX_TOKENS} tokens")

    def number(self, token: Token) -> Node:
        """A numeral, or a mixed number: `2\\frac{1}{2}`, `1 1/4`."""
        whole, at = Num(token.value, token.digits), self.at
        if not token.text.isdigit():
            return whole
        top, slash, bottom = [*self.tokens[at : at + 3], self.tokens[-1], self.tokens[-1]][:3]
        if top.text.isdigit() and slash.text == "/" and bottom.text.isdigit() and 0 < top.value < bottom.value:
            self.at += 3
            return Op("mixed", (whole, Num(top.value / bottom.value)))
        if self.command() == "frac":
            part = self.from_command("frac")
            top, bottom = part.args[:2]
            if isinstance(top, Num) and isinstance(bottom, Num) and 0 < top.value < bottom.value and top.digits == 0:
                return Op("mixed", (whole, Num(top.value / bottom.value)))
            return times(whole, self.suffixes(part))
        return whole

    def call(self, symbol: Node) -> Node:
        """`f(x)`, `I(0)`, `u(t)`: a symbol before parentheses, as a call if that is how it reads, else as it is.

        The letters in `CALLED` and primed symbols are functions; others are if all arguments are symbols or numbers.
        Where that fails, the parentheses are read again as a factor; `not_calls` keeps that from happening twice.
        """
        if self.sign() != "(" or self.at in self.not_calls:
            return symbol
        state = self.at, self.depth, self.bars, self.may_close
        try:
            args = self.nested(self.arguments)
        except ParseError:
            args = []
        name = symbol.name if isinstance(symbol, Sym) else ""
        if args and (name[:1] in CALLED or name.endswith("'") or all(isinstance(arg, Sym | Num) for arg in args)):
            return Op("call", (symbol, *args))
        self.at, self.depth, self.bars, self.may_close = state
        self.not_calls.add(self.at)
        return symbol

    def arguments(self) -> list[Node]:
        self.expect("(")
        args = [self.sum()]
        while self.accept(","):
            args.append(self.sum())
        self.expect(")")
        return args


def transposed(rows: Seq) -> Node:
    """`(1, 2)^T`, a column and so the vector (1, 2); `[[1, 2], [3, 4]]^T`."""
    if any(isinstance(row, Seq) for row in rows.items):
        return Op("^", (rows, TRANSPOSED[0]))
    return Seq("tuple", rows.items)
