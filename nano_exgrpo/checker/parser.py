r"""Tokens -> tree, by recursive descent.

The grammar, loosest binding first. Each rule is one method of `AnswerParser`, in this order:

    answer    := clause (("," | ";" | "and" | "or") clause)* qualifier?      a list; with "or": alternatives
    qualifier := ","? ("for" | "where" | "with") anything | symbols "in" R   where a formula holds
    clause    := ratio (relation ratio)*                                     x = 5, 0 < x <= 3, x in (0, 1)
    ratio     := set (":" set)*                                              3:4, 7:30
    set       := quantity (("cup" | "cap" | "setminus") quantity)*           (0,1) cup {3}
    quantity  := currency? sum multiple? unit? ("and"? number unit)*         5 cm, $2 million, 1 hour 30 minutes
    sum       := product (("+" | "-" | "pm" | "mp") product)* ("over" sum)?
    product   := signed (("*" | "/" | "mod")? signed)*                       an absent sign is a product
    signed    := ("+" | "-" | "pm" | "mp")* power
    power     := atom suffix* ("^" exponent)*
    suffix    := "!" | "!!" | "%" | "deg" | "'" | "_" subscript
    atom      := number | mixed number | symbol | call | group | absolute value | floor | ceiling
               | bracket | braces | label | command
    bracket   := "(" | "[" | "]" clause ("," clause)* ")" | "]" | "["        a group, a tuple or an interval
    braces    := "{" answer? "}" | "{" clause "|" answer "}"                 a set
    label     := words, where a value is expected                            Area = 5; "all real numbers"
    command   := a row of `functions`, read by one of READINGS:
    prefix    := name ("^" exponent | "_" argument)* (group | bare argument) sin x, sin^2 x, log_2 8, ln(x)
    bare      := factors up to a sign or another function                    sin 2x cos x is (sin 2x)(cos x)
    several   := name (group | set | argument)                               gcd(4, 6), max\{1, 2\}
    fraction  := "frac" argument argument                                    \frac{1}{2}, \frac12, \frac{dy}{dx}
    root      := "sqrt" ("[" sum "]")? argument
    big       := ("sum" | "prod" | "int" | "lim") ("_" low)? ("^" high)? body
    environment                                                              matrices and cases

All of the input is read or a `ParseError` is raised. Nothing is evaluated here: no power, no factorial. The length
of the input, the depth of nesting and the height of the tree are bounded, so that parsing takes milliseconds and
nothing after it can recurse too deeply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from nano_exgrpo.checker import tree
from nano_exgrpo.checker.functions import CALLED, FUNCTIONS
from nano_exgrpo.checker.lexer import MAX_CHARS, Token, split_word, tokenize
from nano_exgrpo.checker.tree import Based, Matrix, Node, Num, Op, Quantity, Ratio, Rel, Seq, Sym
from nano_exgrpo.checker.units import DIMENSIONS, NAMED, Unit, parse_unit, starts_symbol
from nano_exgrpo.checker.words import looks_like_word

if TYPE_CHECKING:
    import sympy

MAX_TOKENS = 1_500
MAX_DEPTH = 30  # of nested brackets and arguments
MAX_HEIGHT = 80  # of the tree
QUALIFIERS = {"for", "where", "with"}
MULTIPLES = dict(
    dozen=12, hundred=100, thousand=1_000, lakh=10**5, million=10**6, crore=10**7, billion=10**9, trillion=10**12
)
MULTIPLES |= {
    f"{part}s": Fraction(1, n)
    for n, part in enumerate("third fourth fifth sixth seventh eighth ninth tenth".split(), 3)
}
MULTIPLES |= {part.removesuffix("s"): size for part, size in MULTIPLES.items() if part.endswith("s")}
MULTIPLES |= dict(half=Fraction(1, 2), halves=Fraction(1, 2), quarter=Fraction(1, 4), quarters=Fraction(1, 4))
MULTIPLES |= dict(hundredths=Fraction(1, 100), thousandths=Fraction(1, 1000))
BASE_WORDS = dict(zip("two three four five six seven eight nine ten eleven twelve".split(), map(str, range(2, 13))))
BASE_WORDS["sixteen"] = "16"
RELATIONS = {"=", "<", ">", "<=", ">=", "!=", "~=", "==", "->", "=>", "in", "notin"}
SIGNS = {"+": "+", "-": "neg", "pm": "pm", "mp": "mp"}  # of a term -> the head of its node
CURRENCIES = {"$", "€", "£", "¥", "usd", "eur", "rs", "inr"}
ENDS = {"end", ",", ";", "and", "or", ")", "]", r"\}", "}", "&", "\\\\", "|"}
PROBABILITIES = {"P", "E", "\\mathbbP", "\\mathbbE"}
MATRICES = set("pmatrix bmatrix vmatrix Bmatrix Vmatrix matrix smallmatrix array".split())
ROWS = set("cases aligned align gathered split".split())
UNSAID = {"is", "are", "an", "a", "the", "integer", "number", ",", ".", ";"}  # in conditions
NEGATING = {"not", "wrong", "incorrect", "never", "except", "anything"}
ZERO, ONE, INFINITY = Num(Fraction(0)), Num(Fraction(1)), Op("inf")
POSITIVE, NEGATIVE = Seq("tuple", [ZERO, INFINITY]), Seq("tuple", [Op("neg", (INFINITY,)), ZERO])
NOT_NEGATIVE, NONZERO = Seq("tuple", [ZERO, INFINITY], "[)"), Op("setminus", (Op("reals"), Seq("set", [ZERO])))
REALS = {  # the marks on an R
    "+": POSITIVE,
    "-": NEGATIVE,
    "*": NONZERO,
    ">0": POSITIVE,
    "<0": NEGATIVE,
    ">=0": NOT_NEGATIVE,
    "!=0": NONZERO,
}
PHRASES = {
    "all real numbers, all reals, real numbers, the real numbers, the set of all reals, the set of all real numbers, "
    "the set of real numbers, any real number, all real values": Op("reals"),
    "all positive real numbers, all positive reals, positive real numbers": POSITIVE,
    "all negative real numbers, all negative reals, negative real numbers": NEGATIVE,
    "no solution, no solutions, no real solution, no real solutions, there is no solution, there are no solutions, "
    "empty set, the empty set": Seq("set", []),
    "infinity, infinite, infinitely many, infinitely many solutions, positive infinity": INFINITY,
}
PHRASES = {phrase: node for phrases, node in PHRASES.items() for phrase in phrases.split(", ")}


class ParseError(ValueError):
    """The text is not, as a whole, an answer that the grammar knows."""


def parse(text: str, lists: bool = False) -> Node:
    """The tree of an answer. `lists` reads `1,234` as two numbers (see `tokenize`).

    Raises:
        ParseError: the text is too long, nested too deeply, or not wholly within the grammar.
    """
    if len(text) > MAX_CHARS:
        raise ParseError(f"longer than {MAX_CHARS} characters")
    return parse_tokens(tokenize(text, lists))


def parse_latex(text: str) -> sympy.Basic:
    """The sympy object of an answer; see `sympy_form.to_sympy`.

    >>> parse_latex(r"\\frac{x^2-1}{2\\sqrt{8}}")
    sqrt(2)*(x**2 - 1)/8

    Raises:
        ParseError: the text does not parse, or sympy has no such object of bounded size.
    """
    from nano_exgrpo.checker.sympy_form import to_sympy  # sympy takes a moment to import

    return to_sympy(parse(text))


def parse_tokens(tokens: list[Token]) -> Node:
    """The tree of a token list that ends in a token of kind "end"; see `parse`."""
    if len(tokens) > MAX_TOKENS:
        raise ParseError(f"longer than {MAX_TOKENS} tokens")
    node = AnswerParser(tokens).whole()
    if tree.height(node, MAX_HEIGHT) == MAX_HEIGHT:
        raise ParseError("nested too deeply")
    return node


def is_number_set(token: Token) -> bool:
    return token.text == "reals" or token.text.startswith("\\mathbb")


@dataclass
class AnswerParser:
    """The place in the tokens, and the rules of the grammar."""

    tokens: list[Token]
    at: int = 0
    depth: int = 0
    bars: int = 0  # open absolute values: inside them "|" closes
    stop: list[str] = field(default_factory=list)
    not_calls: set[int] = field(default_factory=set)  # parentheses tried as arguments and found to be a factor
    naming: bool = False  # inside the brackets of a probability, which may hold words
    split_at: int = -1  # the rest of a numeral whose first digit was an argument
    may_close: bool = False  # in a tuple after a comma, where "[" may close an interval written as ]0, 1[

    def whole(self) -> Node:
        """The answer, if all of the tokens belong to it."""
        node = self.answer()
        condition = self.qualifier()
        if isinstance(condition, Rel) and isinstance(node, Rel) and set(node.ops) & tree.INEQUALITIES:
            node = Op("builder", (condition, node))  # 1 < x < 4, x in Z: no interval
        elif condition is not None:
            node = Op("where", (node, condition))
        if self.token.kind != "end":
            raise ParseError(f"unread from {self.token.text!r} on")
        return node

    def answer(self) -> Node:
        items, groups, seen = [self.clause()], [], set()
        while True:
            if self.sign() == "," and self.qualifier_ahead(self.at + 1):
                break
            sign = self.accept(",", ";", "and", "or")
            if not sign:
                break
            while self.accept("and", "or"):  # ", and"
                sign = "or" if self.tokens[self.at - 1].text == "or" else sign
            seen.add(sign)
            if sign == ";":
                groups.append(items)
                items = []
            items.append(self.clause())
        if groups and "," in seen:  # p=5,q=2; p=7,q=2
            return Seq("list", [Seq("tuple", group) if len(group) > 1 else group[0] for group in [*groups, items]])
        items = [item for group in [*groups, items] for item in group]
        first = items[0]
        if isinstance(first, Rel) and first.ops == ["!="]:  # x != 1, -1
            items = [item if isinstance(item, Rel) else Rel([first.terms[0], item], ["!="]) for item in items]
        return Seq("or" if "or" in seen else "list", items) if len(items) > 1 else items[0]

    def qualifier(self) -> Node | None:
        """Where a formula holds: nothing for `for all n` and `, x in R`; `k in Z` as a relation; other conditions,
        `where a > 0` and `with a odd`, as their words. Another value after one is an error: `5 for n = 1, 6 for n = 2`.
        """
        while self.sign() == "," or self.sign() == "(":
            self.at += 1
        if self.token.text in QUALIFIERS and self.token.kind in ("text", "word"):
            word, *rest = self.tokens[self.at :]
            texts = [token.text for token in rest]
            values = [
                token for token, before in zip(rest[1:], texts) if token.kind == "num" and before in (",", ";", "or")
            ]
            if {*texts} & (QUALIFIERS | {"otherwise", "else"}) or values and not {*texts} & RELATIONS:
                raise ParseError("several cases")
            self.at = len(self.tokens) - 1
            return None if word.text == "for" else Sym(" ".join([word.text, *texts]))
        start = self.at
        while self.token.kind == "name" or self.sign() == ",":
            self.at += 1
        names = [Sym(token.text) for token in self.tokens[start : self.at] if token.kind == "name"]
        if names and self.accept("in") and is_number_set(self.token):
            numbers = self.token.text
            self.at += 1
            self.accept(")")
            if numbers != "reals":
                return Rel([names[0] if len(names) == 1 else Seq("list", names), Sym(numbers)], ["in"])
        return None

    def qualifier_ahead(self, at: int) -> bool:
        """Whether a qualifier starts at a token: a word for it, or `k in Z`."""
        if self.tokens[at].text in QUALIFIERS:
            return self.tokens[at].kind in ("text", "word")
        while self.tokens[at].kind == "name" or self.tokens[at].text == ",":
            at += 1
        return self.tokens[at].text == "in" and is_number_set(self.tokens[at + 1])

    def clause(self) -> Node:
        if self.accept("~=", "="):  # "≈ 5", "= 5"
            return self.clause()
        terms, ops = [self.ratio()], []
        while (sign := self.sign()) in RELATIONS:
            self.at += 1
            if sign == "~=" and ops[-1:] != ["~="] and not (len(terms) == 1 and isinstance(terms[0], Sym)):
                self.ratio()  # "exact ≈ rounded": the exact value is the answer
                while self.accept("~=", "="):
                    self.ratio()
                break
            ops.append("=" if sign == "~=" else sign)
            terms.append(self.ratio())
        if not ops:
            return terms[0]
        if ops[-1] == "==" and isinstance(terms[-1], Op) and terms[-1].head == "mod":  # n = 1 mod 4
            terms[-1:] = terms[-1].args
            ops.append("mod")
        elif ops[-1] == "==" and self.command() in ("pmod", "mod", "bmod") or self.sign() == "(" and "==" in ops:
            terms.append(self.modulus())
            ops.append("mod")
        return Rel(terms, ops)

    def modulus(self) -> Node:
        closing = self.accept("(")
        if self.command() in ("pmod", "mod", "bmod") or self.token.text == "mod":
            self.at += 1
        else:
            raise ParseError("expected a modulus")
        node = self.nested(self.signed)
        if closing:
            self.expect(")")
        return node

    def ratio(self) -> Node:
        parts, written = [self.set()], []
        while self.stop[-1:] != [":"] and (self.accept(":") or self.words("to")):
            written.append(self.token.text)
            parts.append(self.set())
        if len(parts) == 1:
            return parts[0]
        unit = parts[-1].unit if isinstance(parts[-1], Quantity) else None
        if unit is not None:
            parts[-1] = parts[-1].value
        clock = all(text.isdigit() and len(text) == 2 and text < "60" for text in written)
        node = Ratio(parts, clock + (clock and any(text[0] == "0" for text in written)))
        return Quantity(node, unit) if unit is not None else node

    def set(self) -> Node:
        node = self.quantity()
        while (sign := self.accept("cup", "cap", "setminus")) or self.words("except"):
            other = self.quantity() if sign else self.clause()
            if not sign:  # all real numbers except x = 2
                other = Seq("set", [other.terms[-1] if isinstance(other, Rel) else other])
            node = Op(sign or "setminus", (node, other))
        return node

    def quantity(self) -> Node:
        if self.accept("..."):
            return Op("...")
        ahead = self.tokens[self.at + (self.sign() == "-")]
        if ahead.kind == "text" and ahead.text in CURRENCIES:  # $5, -$5, Rs. 5
            negative = self.accept("-")
            self.at += 1
            self.accept(".")
            value = self.multiple(self.sum())
            self.unit()  # $5 per hour
            return Quantity(Op("neg", (value,)) if negative else value, Unit.named(ahead.text))
        node = self.multiple(self.sum())
        start = self.at
        unit = self.unit()
        if unit is None:
            return node
        counted = any(name not in DIMENSIONS for name, _ in unit.dims) or self.tokens[start - 1].kind == "roman"
        if counted and tree.symbols(node) and not tree.literals(node):
            self.at = start  # B major: a counted noun needs a number
            return node
        smaller = unit
        while (part := self.smaller_part(smaller)) is not None:  # 1 hour 30 minutes
            smaller = part.unit
            node = Op("+", (node, Op("*", (part.value, Num(smaller.factor / unit.factor)))))
        return Quantity(node, unit)

    def multiple(self, node: Node) -> Node:
        """`1.5 million`, `3 hundred thousand`, `7 tenths`."""
        while self.token.text in MULTIPLES and self.words(self.token.text):
            node = Op("*", (node, Num(Fraction(MULTIPLES[self.tokens[self.at - 1].text]))))
        return node

    def smaller_part(self, unit: Unit) -> Quantity | None:
        """The minutes after hours, the cents after dollars: a number with a smaller unit of the same dimension."""
        start = self.at
        self.accept("and")
        number = self.token
        if number.kind == "num" and unit.dims:
            self.at += 1
            smaller = self.unit()
            if smaller is not None and smaller.dims == unit.dims and smaller.factor < unit.factor:
                return Quantity(Num(number.value, number.digits), smaller)
        self.at = start
        return None

    def unit(self) -> Unit | None:
        """A unit that ends its clause, in brackets or not; None, and nothing read, if what follows is not one."""
        bracket = {"(": ")", "[": "]"}.get(self.sign())  # 5 (cm)
        found = parse_unit(self.tokens, self.at + bool(bracket))
        if found is None:
            return None
        unit, after = found
        if bracket:  # but no factor: 5 (cm), not a (m)
            if self.tokens[after].text != bracket or self.tokens[self.at - 1].kind != "num":
                return None
            after += 1
        token = self.tokens[after]
        if token.kind in ("end", "num") or token.text in ENDS | RELATIONS | QUALIFIERS:
            self.at = after
            return unit
        return None

    def unit_ahead(self) -> bool:
        at = self.at
        found = self.tokens[at - 1].text not in ("*", "/") and self.unit() is not None
        self.at = at
        return found

    def sum(self) -> Node:
        node = self.product()
        while sign := self.accept(*SIGNS):
            term = self.product()
            if sign != "+":
                term = Op(SIGNS[sign], (term,))
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
                if before.kind == "num" and self.token.kind == "num" and self.at != self.split_at:  # \frac125
                    if "^" not in tree.contents(node)[1]:  # 2^3 3^2
                        raise ParseError("two numbers side by side")
                if before.kind == "op" and before.text in ("%", "deg") and self.token.kind == "num":
                    raise ParseError("a number after a percent or degree sign")
                node = times(node, self.power())
            else:
                return node

    def starts_atom(self) -> bool:
        """Whether a factor with no sign before it can start here."""
        kind, text, *_ = self.token
        if kind in ("word", "roman") or text == "\\mu" or kind == "name" and starts_symbol(self.tokens, self.at):
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
            if text in ("|", "||"):
                return not self.bars
            return text in ("(", "{", "lfloor", "lceil") or text == "[" and not self.may_close
        return False

    def signed(self) -> Node:
        if sign := self.accept(*SIGNS):
            node = self.nested(self.signed)
            return node if sign == "+" else Op(SIGNS[sign], (node,))
        return self.power()

    def power(self) -> Node:
        base = self.suffixes(self.atom())
        while self.accept("^"):
            if self.sign() == "'" or self.token.text == "*":
                mark = self.token.text
                self.at += 1
                base = self.marked(base, mark)
                continue
            order = [token.text for token in self.tokens[self.at : self.at + 5]]
            if (
                "".join(order[:2] + order[3:]) == "{()}"
                and order[2] in "1234"
                and base in map(Sym, tree.FUNCTION_LETTERS)
            ):
                self.at += 5  # f^{(3)}(0)
                base = self.call(Sym(base.name + "'" * int(order[2])))
                continue
            exponent = self.exponent()
            if exponent == Op("neg", (ONE,)) and isinstance(base, Sym) and base.name in tree.FUNCTION_LETTERS:
                if self.sign() == "(":  # f^{-1}(x)
                    base = self.call(Sym(base.name + "^{-1}"))
                    continue
            if isinstance(exponent, Sym) and exponent.name.strip("'") == "":
                base = self.marked(base, exponent.name)
                base = self.call(base)
            elif exponent in tree.TRANSPOSED and isinstance(base, Seq) and base.kind == "tuple":
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
        if self.sign() in SIGNS:
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
            self.split_at = self.at
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
                for size in (60, 3600):  # 63° 45' 36''
                    if (part := self.arc_part(size)) is not None:
                        node = Op("+", (node, Num(part.value / size)))
                node = Op("degree", (node,))
            elif self.accept("'"):
                node = self.call(self.marked(node, "'"))
            elif self.sign() == "_":
                node = self.subscript(node)
            else:
                return node

    def arc_part(self, size: int) -> Token | None:
        """The minutes (`size` 60) or seconds (3600) of an angle, if they stand here: 45', 45^{\\prime}, 45 minutes."""
        number, start = self.token, self.at
        if number.kind != "num":
            return None
        self.at += 1
        braced = self.accept("^") and self.accept("{")
        marks = 0
        while self.accept("'"):
            marks += 1
        if braced:
            self.expect("}")
        words = ("minutes", "minute", "min") if size == 60 else ("seconds", "second", "sec")
        if marks == (1 if size == 60 else 2) or not marks and self.words(*words):
            return number
        self.at = start
        return None

    def marked(self, base: Node, mark: str) -> Node:
        if isinstance(base, Sym):
            return Sym(base.name + mark)
        return Op("call", ("prime" + mark, base))

    def subscript(self, node: Node) -> Node:
        self.expect("_")
        if isinstance(node, Op) and node.head == "norm":
            self.argument(whole_number=True)
            return node
        numeral = self.tokens[self.at - (3 if self.tokens[self.at - 2].text == ")" else 2)]
        if isinstance(node, Num) and numeral.text.replace(".", "").isdigit():
            return Based(numeral.text, self.base())
        if node in (Op("e"), Op("i")):  # e_r
            node = Sym(node.head)
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
            if text == "\\jmath":
                return Sym("j")
            return self.call(Sym(text))
        if kind == "text":
            written, after = token.written, self.tokens[self.at + 1].text
            if (
                len(written) in (2, 3)
                and not looks_like_word(written)
                and written not in NAMED
                and after not in ("=", ":", "~=", "(", "[")
            ):
                self.tokens[self.at] = Token("word", written)  # \mathrm{gb}
                return self.atom()
            return self.label()
        if kind == "based":
            self.at += 1
            return Based(*text.split("_"))
        if kind == "cmd":
            return self.command_node(text)
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
            if text in ("|", "||"):
                return self.absolute()
            if text in ("lfloor", "lceil"):
                self.at += 1
                node = self.nested(self.sum)
                self.expect("r" + text[1:])
                return Op(text[1:], (node,))
        raise ParseError(f"unexpected {text or 'end'!r}")

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
            part = self.command_node("frac")
            top, bottom = part.args[:2]
            if isinstance(top, Num) and isinstance(bottom, Num) and 0 < top.value < bottom.value and top.digits == 0:
                return Op("mixed", (whole, Num(top.value / bottom.value)))
            return times(whole, self.suffixes(part))
        return whole

    def call(self, symbol: Node) -> Node:
        """`f(x)`, `I(0)`, `u(t)`: a symbol before parentheses, as a call if that is how it reads, else as it is.

        `FUNCTION_LETTERS` and primed symbols are functions; others are if all arguments are symbols or numbers.
        Where that fails, the parentheses are read again as a factor; `not_calls` keeps that from happening twice.
        """
        name = symbol.name if isinstance(symbol, Sym) else ""
        bracketed = self.sign() == "[" and name in PROBABILITIES
        if self.sign() != "(" and not bracketed or self.at in self.not_calls:
            return symbol
        state = self.at, self.depth, self.bars, self.may_close
        self.naming = name in PROBABILITIES
        try:
            args = self.nested(self.arguments, bars=name in PROBABILITIES)  # P(A|B)
        except ParseError:
            args = []
        self.naming = False
        if args and name in FUNCTIONS and FUNCTIONS[name].arity == len(args):
            return Op(name, tuple(args))
        is_function = name[:1] in tree.FUNCTION_LETTERS or name[-1:] in ("'", "}") or name.startswith("\\mathbb")
        no_factor = any(isinstance(a, Rel) or isinstance(a, Op) and a.head in ("cup", "cap", "given") for a in args)
        if args and (is_function or no_factor or all(isinstance(arg, Sym | Num) for arg in args)):
            return Op("call", (symbol, *args))
        self.at, self.depth, self.bars, self.may_close = state
        self.not_calls.add(self.at)
        return symbol

    def arguments(self) -> list[Node]:
        closing = {"(": ")", "[": "]"}[self.expect("(", "[")]
        args = [self.clause()]
        while sign := self.accept(",", "|"):
            args.append(self.clause() if sign == "," else Op("given", (self.clause(),)))
        self.expect(closing)
        return args

    def absolute(self) -> Node:
        """`|x|`, `|A \\cup B|`, the norm `\\|v\\|` or `||v||`."""
        opened = self.expect("|", "||")
        doubled = opened == "|" and self.accept("|")
        node = self.nested(self.set, bars=1)
        self.expect(opened)
        if doubled:
            self.expect("|")
        return Op("norm" if doubled or opened == "||" else "abs", (node,))

    def bracket(self) -> Node:
        """`(...)`, `[...)`, `]...[`: a group if it holds one item, else a tuple or an interval."""
        opened = self.expect("(", "[", "]")
        items = [self.clause()]
        while self.accept(",", ";"):
            self.may_close = True
            items.append(self.clause())
        if opened == "]":
            closed = self.expect("]", "[")
        elif len(items) == 2 and self.sign() == "[":
            closed = self.expect("[")
        else:
            closed = self.expect(")", "]")
        ends = {"]": "(", "[": "["}.get(opened, "(") + {"[": ")"}.get(closed, closed)
        if len(items) == 1:
            if ends in ("()", "[]"):
                return items[0]
            raise ParseError("brackets do not match")
        return Seq("tuple", items, ends)

    def braces(self) -> Node:
        r"""`\{1, 2\}`, `\{\}`, `\{x \mid x > 2\}`, `\{x \in R : x > 2\}`."""
        self.expect(r"\{")
        if self.accept(r"\}"):
            return Seq("set", [])
        if self.command().startswith("begin "):  # \left\{\begin{array}{ll} ...
            name = self.command()[6:]
            self.at += 1
            node = self.environment(name, rows_only=True)
            self.accept(r"\}")
            return node
        self.stop.append(":")
        self.bars += 1
        node = self.answer()
        self.bars -= 1
        builder = self.accept("|", ":")
        if builder:
            self.bars += 1
            element, node = node, self.answer()
            self.bars -= 1
            if isinstance(element, Rel) and element.ops == ["in"] and element.terms[1] == Op("reals"):
                element = element.terms[0]
            if not isinstance(element, Sym):  # {2x | x > 2}, {n in Z | n > 5}: no interval
                node = Op("builder", (element, node))
        self.stop.pop()
        self.expect(r"\}")
        if builder:
            return node
        return Seq("set", node.items if isinstance(node, Seq) and node.kind in ("list", "or") else [node])

    def label(self) -> Node:
        """A phrase that stands for a set, or words before "=" or ":" that name what follows: `\\text{Area} = 5`."""
        words: list[str] = []
        while self.token.kind in ("text", "roman", "name", "word") and len(words) < 8 and self.token.text != "except":
            words.append(self.token.text)
            self.at += 1
        phrase = " ".join(words)
        if NEGATING & {*words}:
            raise ParseError("a label that denies")
        if phrase in PHRASES:
            return PHRASES[phrase]
        args = self.nested(self.arguments, bars=1) if self.sign() in ("(", "[") and words else []  # Var(X) = 5
        if self.naming and self.sign() in (")", "]", ",", "|"):  # P(win)
            return Sym("text " + phrase)
        if self.sign() not in ("=", ":", "~="):
            raise ParseError(f"unexpected words {phrase!r}")
        if self.sign() == ":":
            self.tokens[self.at] = Token("op", "=")
        name = Sym("text " + phrase)
        return Op("call", (name, *args)) if args else name

    # -- commands

    def command_node(self, name: str) -> Node:
        self.at += 1
        if name.startswith("begin "):
            return self.nested(lambda: self.environment(name[6:]))
        reading = FUNCTIONS[name].reading if name in FUNCTIONS else ""
        if reading not in READINGS:
            raise ParseError(f"unexpected \\{name}")
        return READINGS[reading](self, name)

    def prefix(self, name: str) -> Node:
        """`sin x`, `sin^2 x`, `sin^{-1} x`, `log_2 8`, `exp{-at}`, `ln(x)`."""
        power = base = None
        while sign := self.accept("^", "_"):
            value = self.argument(whole_number=True) if sign == "_" else self.exponent()
            power, base = (value, base) if sign == "^" else (power, value)
        if self.sign() in ("(", "{", "[", "|"):
            argument = in_radians(self.nested(self.atom), name)
            if isinstance(argument, Seq):
                raise ParseError(f"{name} of several arguments")
        elif self.command() in CALLED - {"sqrt"}:
            argument = self.nested(self.power)
        else:
            argument = in_radians(self.nested(self.bare_argument), name)
        if power == Op("neg", (ONE,)) and name[:3] in tree.TRIGONOMETRIC:
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

    def several(self, name: str) -> Node:
        if self.sign() not in ("(", "{", r"\{"):
            return self.prefix(name)
        node = {"(": self.bracket, r"\{": self.braces}.get(self.sign())
        node = self.nested(node) if node else self.argument()
        return Op(name, tuple(node.items) if isinstance(node, Seq) else (node,))

    def binomial(self, name: str) -> Node:
        node = self.several(name) if self.sign() in ("(", r"\{") else Op(name, (self.argument(), self.argument()))
        if len(node.args) != 2:
            raise ParseError("a binomial needs two arguments")
        return node

    def fraction(self, name: str) -> Node:
        top = self.argument()
        bottom = self.argument()
        return derivative(top, bottom) or Op("/", (top, bottom))

    def root(self, name: str) -> Node:
        index = None
        if self.accept("["):
            index = self.nested(self.sum)
            self.expect("]")
        bracketed = self.sign() == "("  # \sqrt(5), sqrt(5)
        radicand = self.nested(self.bracket) if bracketed else self.argument(whole_number=True)
        return Op("sqrt", (radicand,)) if index is None else Op("root", (radicand, index))

    def reals(self, name: str) -> Node:
        """R, R^+, R_{+}, R^-, R_{>0}, R_{>=0}, R^*."""
        braced = self.tokens[self.at + (self.token.kind != "end")].text == "{"
        first = self.at + 1 + braced
        for end in (first + 1, first + 2) if self.sign() in ("^", "_") else ():
            mark = "".join(token.text for token in self.tokens[first:end])
            if mark in REALS and (not braced or self.tokens[end].text == "}"):
                self.at = end + braced
                return REALS[mark]
        return Op("reals")

    def accent(self, name: str) -> Node:
        if self.token.kind == "name" and self.token.text not in ("i", "j", "k", "\\imath", "\\jmath"):
            # \ddot\theta(t): the accent is not on the call
            self.at += 1
            return self.call(Sym(f"\\{name} {self.tokens[self.at - 1].text}"))
        under = self.argument()
        self.split_at = -1  # \vec33 is no product
        if name == "hat" and under in (Op("i"), Sym("j"), Sym("k")):  # the unit vectors, like \\mathbf{i}
            return under
        if name == "overline" and "i" in tree.contents(under)[1]:
            return Op("conj", (under,))
        return self.call(Sym(f"\\{name} {name_of(under)}"))

    def vector(self, name: str) -> Node:
        """An arrow from A to B; over one letter it is layout."""
        if self.token.kind == "name":
            return self.atom()
        under = self.argument()
        self.split_at = -1  # \vec33 is no product
        return Sym(f"\\{name} {name_of(under)}") if isinstance(under, Op) and under.args else under

    def angle(self, name: str) -> Node:
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

    def big(self, name: str) -> Node:
        low = high = Op("...")
        while sign := self.accept("_", "^"):
            if sign == "^":
                high = self.exponent()
            elif self.accept("{"):
                low = self.nested(self.clause)
                self.expect("}")
            else:
                low = self.argument()
        return Op(name, (low, high, self.nested(self.sum if name == "int" else self.product)))

    def environment(self, name: str, rows_only: bool = False) -> Node:
        """A matrix; or, of `ROWS` and if `rows_only`, a list of its rows, each of a value and the condition for it."""
        if name not in MATRICES | ROWS:
            raise ParseError(f"unknown environment {name}")
        if name in ROWS - {"cases"}:  # x &= 5: the sign only aligns
            self.tokens[self.at :] = [token for token in self.tokens[self.at :] if token.text != "&"]
        rows: list[list] = [[]]
        while self.command() != f"end {name}":
            if self.accept("\\\\"):
                rows.append([])
            elif not self.accept("&", ",", ".", ";"):
                is_condition = rows[-1] and (name in ROWS or rows_only)
                rows[-1].append(self.condition() if is_condition else self.clause())
        self.at += 1
        rows = [row for row in rows if row]
        if name in ROWS or rows_only:
            return Seq("list", [Seq("tuple", row) if len(row) > 1 else row[0] for row in rows])
        if not rows or len({len(row) for row in rows}) != 1:
            raise ParseError("a matrix with ragged rows")
        matrix = Matrix(rows)
        return Op("det", (matrix,)) if name == "vmatrix" else matrix

    def condition(self) -> Node:
        """When a case holds: a relation, or words: `if n is even` and `n even` are the same ones."""
        self.words("if", "for", "when", "where")
        start = self.at
        if self.words("otherwise", "else", "elsewhere"):
            return Sym("text otherwise")
        while self.sign() not in ("\\\\", "&", "end") and not self.command().startswith("end "):
            self.at += 1
        spoken = self.tokens[start : self.at]
        if not any(token.kind == "text" for token in spoken):
            self.at = start
            return self.clause()
        said = [token.text for token in spoken if token.text not in UNSAID]
        return Sym("text " + " ".join(said))

    def split(self) -> None:
        """Replace a run of bare letters by its letters and the functions in it: `xsin` -> x, sin."""
        self.tokens[self.at : self.at + 1] = split_word(self.token.text)
        if len(self.tokens) > MAX_TOKENS:
            raise ParseError(f"longer than {MAX_TOKENS} tokens")

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


def times(a: Node, b: Node) -> Node:
    """The product, flat: a product of many factors is one node."""
    return Op("*", (*a.args, b) if isinstance(a, Op) and a.head == "*" else (a, b))


def in_radians(node: Node, function: str) -> Node:
    """The argument of a trigonometric function with its degrees converted: `sin 30°`."""
    if isinstance(node, Op) and function in tree.TRIGONOMETRIC:
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


def derivative(top: Node, bottom: Node) -> Node | None:
    """`\\frac{dy}{dx}`, `\\frac{d^2 y}{dx^2}` as an opaque function of y and x; None for other fractions."""
    over, under = factors(top), factors(bottom)
    d = Sym("d")
    order = over[0].args[1] if isinstance(over[0], Op) and over[0].head == "^" and over[0].args[0] == d else None
    if len(over) < 2 or len(under) < 2 or under[0] != d or not (over[0] == d or order):
        return None
    return Op("call", ("d", order or ONE, *over[1:], *under[1:]))


def factors(node: Node) -> list:
    return [f for a in node.args for f in factors(a)] if isinstance(node, Op) and node.head == "*" else [node]


def transposed(rows: Seq) -> Node:
    """`(1, 2)^T`, a column and so the vector (1, 2); `[[1, 2], [3, 4]]^T`."""
    if any(isinstance(row, Seq) for row in rows.items):
        return Op("^", (rows, tree.TRANSPOSED[0]))
    return Seq("tuple", rows.items)


READINGS: dict[str, Callable[[AnswerParser, str], Node]] = {
    "constant": lambda parser, name: Op(name),
    "emptyset": lambda parser, name: Seq("set", []),
    "reals": AnswerParser.reals,
    "prefix": AnswerParser.prefix,
    "several": AnswerParser.several,
    "binomial": AnswerParser.binomial,
    "fraction": AnswerParser.fraction,
    "root": AnswerParser.root,
    "accent": AnswerParser.accent,
    "vector": AnswerParser.vector,
    "angle": AnswerParser.angle,
    "big": AnswerParser.big,
}
