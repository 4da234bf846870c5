"""Stage 2 of the answer checker, last third: answers; tokens -> tree, by recursive descent.

The grammar, loosest binding first; each rule is one method of `Parser`, in this order:

    answer    := clause (("," | ";" | "and" | "or") clause)* qualifier?      a list; with "or": alternatives
    qualifier := ","? ("for" | "where" | "with") anything | symbols "in" R   where a formula holds
    clause    := ratio (relation ratio)*                                     x = 5, 0 < x <= 3, x in (0, 1)
    ratio     := set (":" set)*                                              3:4, 7:30
    set       := quantity (("cup" | "cap" | "setminus") quantity)*           (0,1) cup {3}
    quantity  := currency? sum multiple? unit? ("and"? number unit)*         5 cm, $2 million, 1 hour 30 minutes
    sum       := ...                                                         see `expressions`
    label     := words, where a value is expected                            Area = 5; "all real numbers"
    bracket   := "(" | "[" | "]" clause ("," clause)* ")" | "]" | "["        a group, a tuple or an interval
    braces    := "{" answer? "}" | "{" clause "|" answer "}"                 a set
    environment                                                              matrices and cases

All of the input is read or `parse` raises `ParseError`. The length of the input, the depth of nesting and the
height of the tree are bounded, so that parsing takes milliseconds and nothing after it can recurse too deeply.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from nano_exgrpo.checker.commands import NEGATIVE, POSITIVE
from nano_exgrpo.checker.cursor import MAX_TOKENS, ParseError
from nano_exgrpo.checker.expressions import ExpressionParser
from nano_exgrpo.checker.lexer import MAX_CHARS, Token, tokenize
from nano_exgrpo.checker.tree import INEQUALITIES, Matrix, Node, Num, Op, Quantity, Ratio, Rel, Seq, Sym, height
from nano_exgrpo.checker.units import Unit, parse_unit

if TYPE_CHECKING:
    import sympy

MAX_HEIGHT = 80  # of the tree
QUALIFIERS = {"for", "where", "with"}
MULTIPLES = dict(
    dozen=12, hundred=100, thousand=1_000, lakh=10**5, million=10**6, crore=10**7, billion=10**9, trillion=10**12
)
MULTIPLES |= {
    f"{part}s": Fraction(1, n)
    for n, part in enumerate("third fourth fifth sixth seventh eighth ninth tenth".split(), 3)
}
MULTIPLES |= dict(halves=Fraction(1, 2), hundredths=Fraction(1, 100), thousandths=Fraction(1, 1000))
RELATIONS = {"=", "<", ">", "<=", ">=", "!=", "~=", "==", "->", "=>", "in", "notin"}
CURRENCIES = {"$", "€", "£", "¥", "usd", "eur", "rs", "inr"}
ENDS = {"end", ",", ";", "and", "or", ")", "]", r"\}", "}", "&", "\\\\", "|"}
MATRICES = set("pmatrix bmatrix vmatrix Bmatrix Vmatrix matrix smallmatrix array".split())
ROWS = set("cases aligned align gathered split".split())
NEGATING = {"not", "wrong", "incorrect", "never", "except", "anything"}
PHRASES = {
    **dict.fromkeys(
        [
            "all real numbers",
            "all reals",
            "real numbers",
            "the real numbers",
            "the set of all reals",
            "the set of all real numbers",
            "the set of real numbers",
            "any real number",
            "all real values",
        ],
        Op("reals"),
    ),
    **dict.fromkeys(["all positive real numbers", "all positive reals", "positive real numbers"], POSITIVE),
    **dict.fromkeys(["all negative real numbers", "all negative reals", "negative real numbers"], NEGATIVE),
    **dict.fromkeys(
        [
            "no solution",
            "no solutions",
            "no real solution",
            "no real solutions",
            "there is no solution",
            "there are no solutions",
            "empty set",
            "the empty set",
        ],
        Seq("set", []),
    ),
    **dict.fromkeys(
        ["infinity", "infinite", "infinitely many", "infinitely many solutions", "positive infinity"], Op("inf")
    ),
}


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
    tree = Parser(tokens).parse()
    if height(tree, MAX_HEIGHT) == MAX_HEIGHT:
        raise ParseError("nested too deeply")
    return tree


def is_number_set(token: Token) -> bool:
    return token.text == "reals" or token.text.startswith("\\mathbb")


class Parser(ExpressionParser):
    """Rules for answers."""

    def parse(self) -> Node:
        node = self.answer()
        condition = self.qualifier()
        if isinstance(condition, Rel) and isinstance(node, Rel) and set(node.ops) & INEQUALITIES:
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
        """Where a formula holds: nothing for `for all n` and `, x in R`; `k in Z` as a relation; the words of other
        conditions, `where a > 0`, `with a odd`. Raises ParseError where another value follows: `5 for n = 1, 6 for n = 2`."""
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
        parts = [self.set()]
        while self.stop[-1:] != [":"] and (self.accept(":") or self.words("to")):
            minutes = self.token.text
            parts.append(self.set())
            if len(minutes) == 2 and minutes[0] == "0" and parts[-1] == Num(Fraction(int(minutes))):
                parts[-1] = Sym(f"clock {minutes}")  # 3:05 is no ratio
        if len(parts) == 1:
            return parts[0]
        unit = parts[-1].unit if isinstance(parts[-1], Quantity) else None
        if unit is not None:
            parts[-1] = parts[-1].value
        return Quantity(Ratio(parts), unit) if unit is not None else Ratio(parts)

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
        unit = self.unit()
        if unit is None:
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

    def label(self) -> Node:
        """A phrase that stands for a set, or words before "=" or ":" that name what follows: `\\text{Area} = 5`."""
        words: list[str] = []
        while self.token.kind in ("text", "roman", "name") and len(words) < 8 and self.token.text != "except":
            words.append(self.token.text)
            self.at += 1
        phrase = " ".join(words)
        if NEGATING & {*words}:
            raise ParseError("a label that denies")
        if phrase in PHRASES:
            return PHRASES[phrase]
        if self.sign() not in ("=", ":", "~="):
            raise ParseError(f"unexpected words {phrase!r}")
        if self.sign() == ":":
            self.tokens[self.at] = Token("op", "=")
        return Sym("text " + phrase)

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

    def environment(self, name: str) -> Node:
        if name not in MATRICES | ROWS:
            raise ParseError(f"unknown environment {name}")
        if name in ROWS - {"cases"}:  # x &= 5: the sign only aligns
            self.tokens[self.at :] = [token for token in self.tokens[self.at :] if token.text != "&"]
        rows: list[list] = [[]]
        while self.command() != f"end {name}":
            if self.accept("\\\\"):
                rows.append([])
            elif self.words("otherwise"):
                rows[-1].append(Sym("text otherwise"))
            elif not self.accept("&"):
                self.words("if", "for", "when")
                rows[-1].append(self.clause())
                self.accept(",")
        self.at += 1
        rows = [row for row in rows if row]
        if name in ROWS:
            return Seq("list", [Seq("tuple", row) if len(row) > 1 else row[0] for row in rows])
        if not rows or len({len(row) for row in rows}) != 1:
            raise ParseError("a matrix with ragged rows")
        matrix = Matrix(rows)
        return Op("det", (matrix,)) if name == "vmatrix" else matrix
