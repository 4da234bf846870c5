"""Stage 2 of the answer checker, first third: LaTeX commands and functions, by recursive descent.

    command   := pi | infinity | set name | fraction | root | binomial | accent | angle | big operator
               | environment | function
    fraction  := "frac" argument argument                                    \\frac{1}{2}, \\frac12, \\frac{dy}{dx}
    root      := "sqrt" ("[" sum "]")? argument
    function  := name ("^" exponent | "_" argument)* (group | bare argument) sin x, sin^2 x, log_2 8, ln(x)
    bare      := factors up to a sign or another function                    sin 2x cos x is (sin 2x)(cos x)
    big       := ("sum" | "prod" | "int" | "lim") ("_" low)? ("^" high)? body

Each rule is one method of `CommandParser`; those it refers to (`argument`, `sum`, `power`, ...) are rules of
`expressions`, the second third. Nothing is evaluated here.
"""

from __future__ import annotations

from fractions import Fraction

from nano_exgrpo.checker.cursor import Cursor, ParseError
from nano_exgrpo.checker.lexer import FUNCTIONS
from nano_exgrpo.checker.tree import Node, Num, Op, Seq, Sym, contents

POSITIVE = Seq("tuple", [Num(Fraction(0)), Op("inf")])
NEGATIVE = Seq("tuple", [Op("neg", (Op("inf"),)), Num(Fraction(0))])
NONZERO = Op("setminus", (Op("reals"), Seq("set", [Num(Fraction(0))])))
TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc"}


class CommandParser(Cursor):
    """Rules for commands."""

    def from_command(self, name: str) -> Node:
        self.at += 1
        if name in ("pi", "infty"):
            return Op({"infty": "inf"}.get(name, name))
        if name == "emptyset":
            return Seq("set", [])
        if name == "reals":
            return self.reals()
        if name == "frac":
            return self.fraction()
        if name == "sqrt":
            return self.root()
        if name == "binom" or name in ("gcd", "lcm", "min", "max") and self.sign() in ("(", "{", r"\{"):
            return self.two_arguments(name)
        if name == "overrightarrow":
            vector = self.argument()  # from A to B; over one letter it is layout, like \vec
            return Sym(f"\\{name} {name_of(vector)}") if isinstance(vector, Op) else vector
        if name in ("overline", "hat", "dot", "ddot", "tilde"):
            if self.token.kind == "name":  # \ddot\theta(t): the accent is not on the call
                self.at += 1
                return self.call(Sym(f"\\{name} {self.tokens[self.at - 1].text}"))
            under = self.argument()
            if name == "overline" and "i" in contents(under)[1]:
                return Op("conj", (under,))
            return self.call(Sym(f"\\{name} {name_of(under)}"))
        if name == "angle":
            return self.angle()
        if name in ("sum", "prod", "int", "lim"):
            return self.big_operator(name)
        if name.startswith("begin "):
            return self.nested(lambda: self.environment(name[6:]))
        if name in FUNCTIONS:
            return self.function(name)
        raise ParseError(f"unexpected \\{name}")

    def angle(self) -> Node:
        """`\\angle ABC`, `\\angle A_1`: a symbol."""
        letters: list[str] = []
        while self.token.kind in ("name", "word", "num") and len(letters) < 6:
            letters.append(self.token.text)
            self.at += 1
            if self.accept("_"):
                letters.append("_" + name_of(self.argument()))
        if not letters:
            raise ParseError("an angle without a name")
        return Sym("\\angle " + "".join(letters))

    def reals(self) -> Node:
        """R, R^+, R_{+}, R^-, R_{>0}, R_{>=0}, R^*."""
        if self.sign() not in ("^", "_"):
            return Op("reals")
        braced = self.tokens[self.at + 1].text == "{"
        marks = [token.text for token in self.tokens[self.at + 1 + braced :]]
        for found, *mark in (
            (POSITIVE, "+"),
            (NEGATIVE, "-"),
            (NONZERO, "*"),
            (POSITIVE, ">", "0"),
            (NEGATIVE, "<", "0"),
            (Seq("tuple", POSITIVE.items, "[)"), ">=", "0"),
            (NONZERO, "!=", "0"),
        ):
            if marks[: len(mark)] == mark and (not braced or marks[len(mark)] == "}"):
                self.at += 1 + len(mark) + 2 * braced
                return found
        return Op("reals")

    def fraction(self) -> Node:
        top = self.argument()
        bottom = self.argument()
        if isinstance(top, Op) and isinstance(bottom, Op) and (variable := derivative(top, bottom)):
            return variable
        return Op("/", (top, bottom))

    def root(self) -> Node:
        index = None
        if self.accept("["):
            index = self.nested(self.sum)
            self.expect("]")
        if self.sign() == "(":  # \sqrt(5), sqrt(5)
            radicand = self.nested(self.bracket)
        else:
            radicand = self.argument(whole_number=True)
        return Op("sqrt", (radicand,)) if index is None else Op("root", (radicand, index))

    def two_arguments(self, name: str) -> Node:
        if self.sign() in ("(", r"\{"):
            node = self.nested(self.bracket if self.sign() == "(" else self.braces)
            items = node.items if isinstance(node, Seq) else [node]
        else:
            first = self.argument()
            if name == "binom":
                items = [first, self.argument()]
            else:
                items = first.items if isinstance(first, Seq) else [first]
        if name == "binom" and len(items) != 2:
            raise ParseError("a binomial needs two arguments")
        return Op(name, tuple(items))

    def function(self, name: str) -> Node:
        """`sin x`, `sin^2 x`, `sin^{-1} x`, `log_2 8`, `exp{-at}`, `ln(x)`."""
        power = base = None
        while sign := self.accept("^", "_"):
            value = self.argument(whole_number=True) if sign == "_" else self.exponent()
            power, base = (value, base) if sign == "^" else (power, value)
        if self.sign() in ("(", "{", "[", "|"):
            argument = in_radians(self.nested(self.atom), name)
            if isinstance(argument, Seq):
                raise ParseError(f"{name} of several arguments")
        elif self.command() in FUNCTIONS - {"sqrt"}:
            argument = self.nested(self.power)
        else:
            argument = in_radians(self.nested(self.bare_argument), name)
        if power == Op("neg", (Num(Fraction(1)),)) and name[:3] in TRIGONOMETRIC:
            return Op("arc" + name, (argument,))
        if name == "cis":
            argument = in_radians(argument, "cos")
            node = Op("+", (Op("cos", (argument,)), Op("*", (Op("i"), Op("sin", (argument,))))))
        elif name == "log" and base is not None:
            node = Op("logbase", (argument, base))
        elif name == "lg":
            node = Op("logbase", (argument, Num(Fraction(10))))
        else:
            node = Op(name, (argument,))
        return node if power is None else Op("^", (node, power))

    def bare_argument(self) -> Node:
        """The argument of a function written without parentheses: factors up to a sign or another function."""
        node = self.signed()
        while (
            self.token.kind in ("num", "name", "word")
            or self.command() in ("frac", "sqrt", "pi")
            or (self.sign() == "(" and isinstance(node, Num))
        ):
            if self.token.kind == "word" and self.unit_ahead():
                break
            if self.token.kind == "word":
                self.split()
                continue
            node = times(node, self.power())
        return node

    def big_operator(self, name: str) -> Node:
        low = high = None
        while sign := self.accept("_", "^"):
            if sign == "_":
                if self.accept("{"):
                    low = self.nested(self.clause)
                    self.expect("}")
                else:
                    low = self.argument()
            else:
                high = self.exponent()
        body = self.nested(self.sum if name == "int" else self.product)
        return Op(name, (low or Op("..."), high or Op("..."), body))


def times(a: Node, b: Node) -> Node:
    """The product, flat: a product of many factors is one node."""
    return Op("*", (*a.args, b) if isinstance(a, Op) and a.head == "*" else (a, b))


def in_radians(node: Node, function: str) -> Node:
    """The argument of a trigonometric function with its degrees converted: `sin 30°`."""
    if isinstance(node, Op) and function in TRIGONOMETRIC:
        head = "radians" if node.head == "degree" else node.head
        return Op(head, tuple(in_radians(arg, function) for arg in node.args))
    return node


def name_of(node: Node) -> str:
    """A name for the symbol under an accent: `\\overline{AB}` -> "AB"."""
    if isinstance(node, Sym):
        return node.name
    if isinstance(node, Op) and node.head == "*":
        return "".join(name_of(a) for a in node.args)
    if isinstance(node, Op) and node.head == "sub":
        return name_of(node.args[0]) + "_" + name_of(node.args[1])
    if isinstance(node, Num):
        return str(node.value)
    if isinstance(node, Op) and not node.args:
        return node.head
    raise ParseError("an accent over an expression")


def derivative(top: Op, bottom: Op) -> Node | None:
    """`\\frac{dy}{dx}`, `\\frac{d^2 y}{dx^2}` as an opaque function of y and x; None for other fractions."""
    over, under = factors(top), factors(bottom)
    d = Sym("d")
    order = over[0].args[1] if isinstance(over[0], Op) and over[0].head == "^" and over[0].args[0] == d else None
    if len(over) < 2 or len(under) < 2 or under[0] != d or not (over[0] == d or order):
        return None
    return Op("call", ("d", order or Num(Fraction(1)), *over[1:], *under[1:]))


def factors(node: Node) -> list:
    return [f for a in node.args for f in factors(a)] if isinstance(node, Op) and node.head == "*" else [node]
