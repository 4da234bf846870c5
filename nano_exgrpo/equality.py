"""Stage 4 of the answer checker: whether two trees state the same answer.

`Judge(gold, answer).equal()` applies the policy, one method per kind of answer, in the order of this file:

- scalars are equal if they are the same number: exactly where both are rational, else to 40 digits *relative* to
  their size, at several random points if they contain symbols. An exact gold needs an exact answer.
- p% is p/100; a percent sign may be dropped or added on a number of at least 1. Degrees may be dropped or added.
- a unit dropped or added is fine, a conflicting one is not.
- a label dropped or added is fine (`x=5` and `5`); an equation is not its right side, and equals another one if
  one is a constant multiple of the other.
- lists and sets are unordered, every value once; tuples are ordered; intervals equal the inequalities they solve.
- matrices are equal entry by entry; numerals with a base, ratios and times as written.

A verdict has a budget of work (see `values`), so it comes in milliseconds whatever the input.
"""

from __future__ import annotations

from fractions import Fraction

from nano_exgrpo.expressions import TRANSPOSED
from nano_exgrpo.reals import FLIPPED, RealLine
from nano_exgrpo.tree import (Based, Matrix, Node, Num, Op, Quantity, Ratio, Rel, Seq, Sym, choose_signs, contents,
                              count_signs, infinity, is_constant, is_label, is_word_label, negative_base, same_function,
                              show, substitute, symbols, without_letter_unit)
from nano_exgrpo.values import NOISE, Evaluator, Undefined, close, sample

BUDGET = 8_000              # work units of one verdict, some 5 microseconds each
POINTS = 7                  # random points for expressions with symbols
WHOLE_POINTS = 41           # whole numbers for expressions with floors: all from 1 to 41
MAX_ITEMS = 64              # of a list or set
LITERAL_DIGITS = 12         # a decimal literal of so many right digits stands for the exact value
STEPS = {"floor", "ceil", "mod"}
WHOLE = STEPS | {"factorial", "factorial2", "binom", "sum", "prod", "gcd", "lcm"}   # mean little off the integers
OPAQUE = {"call", "sub", "int", "lim", "sum", "prod"}                              # have random values (see `values`)
PLUS_MINUS = {"pm", "mp"}


def difference(rel: Rel) -> Op:
    """Left side minus right side."""
    return Op("+", (rel.terms[0], Op("neg", (rel.terms[1],))))


class Judge:
    """One verdict: `why` says, for people, what decided it."""

    def __init__(self, gold: Node, answer: Node):
        self.gold, self.answer = gold, answer
        self.budget = [BUDGET]
        self.line = RealLine(self.budget)
        self.why = ""

    def verdict(self) -> bool:
        try:
            return self.equal(self.gold, self.answer)
        except Undefined as error:
            return self.no(f"no value: {error}")

    def no(self, why: str) -> bool:
        self.why = why                                           # the outermost reason is noted last
        return False

    # -- dispatch by kind

    def equal(self, a: Node, b: Node) -> bool:
        """Whether `b` states the answer `a`."""
        if isinstance(a, Op) and a.head == "where":              # one more condition than the gold answer's is fine
            if not isinstance(b, Op) or b.head != "where" or a.args[1] != b.args[1]:
                return self.no("the condition differs")
            a = a.args[0]
        b = b.args[0] if isinstance(b, Op) and b.head == "where" else b
        a, b = self.unwrapped(a), self.unwrapped(b)
        if isinstance(a, Quantity) or isinstance(b, Quantity):
            return self.quantities(a, b)
        if (contents(a)[1] | contents(b)[1]) & PLUS_MINUS:
            a, b = self.spread(a), self.spread(b)
        if isinstance(a, Rel) and isinstance(b, Rel) and self.both_relations(a, b):
            return True
        if self.line.is_real_set(a) or self.line.is_real_set(b):
            sets = self.line.real_set(a), self.line.real_set(b)
            if None not in sets:
                return self.sets_equal(*sets) or self.no("they are different sets of real numbers")
        if isinstance(a, Rel) or isinstance(b, Rel):
            return self.relations(a, b)
        if isinstance(a, Seq) or isinstance(b, Seq) or self.has_matrix(a) or self.has_matrix(b):
            return self.containers(a, b)
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            return self.ratios(a, b) or self.no("different ratios or times")
        if isinstance(a, Based) or isinstance(b, Based):
            return a == b or self.no("numerals with a base are compared as written")
        return self.scalars(a, b)

    def unwrapped(self, node: Node) -> Node:
        """A container of one item is that item."""
        while isinstance(node, Seq) and len(node.items) == 1 and node.kind != "tuple":
            node = node.items[0]
        return node

    # -- units

    def quantities(self, a: Node, b: Node) -> bool:
        (a, unit_a), (b, unit_b) = ((n.value, n.unit) if isinstance(n, Quantity) else (n, None) for n in (a, b))
        if unit_a and unit_b and unit_a.conflicts(unit_b):
            return self.no("the units conflict")
        if unit_a and unit_b and unit_a.dims and unit_b.dims and unit_a.factor != unit_b.factor:
            b = Op("*", (b, Num(unit_b.factor / unit_a.factor)))
        return self.equal(a, b)

    # -- plus-minus: one value for each choice of signs

    def spread(self, node: Node) -> Node:
        """`a pm b` as the list of its values. Signs are chosen independently, together where "mp" occurs."""
        if isinstance(node, Seq) and node.kind != "tuple":
            items = []
            for item in map(self.spread, node.items):
                items += item.items if isinstance(item, Seq) and item.kind == "list" else [item]
            return Seq(node.kind, items)
        heads = contents(node)[1]
        if not heads & PLUS_MINUS:
            return node
        if isinstance(node, Op) and node.head in ("cup", "cap", "setminus"):
            return Op(node.head, tuple(map(self.spread, node.args)))
        if isinstance(node, Rel) and node.ops == ["in"]:
            return Rel([node.terms[0], self.spread(node.terms[1])], node.ops)
        if isinstance(node, Rel) and len(node.terms) == 2 and node.ops == ["="]:
            values = self.spread(node.terms[1])
            if isinstance(values, Seq):
                return Seq("list", [Rel([node.terms[0], value], ["="]) for value in values.items])
        count = count_signs(node)
        if count > 4:
            raise Undefined("too many plus-minus signs")
        if "mp" in heads:
            return Seq("list", [choose_signs(node, [sign], together=True) for sign in (1, -1)])
        variants = [[1 - 2 * (bits >> k & 1) for k in range(count)] for bits in range(2 ** count)]
        return Seq("list", [choose_signs(node, signs, together=False) for signs in variants])

    # -- relations

    def relations(self, a: Node, b: Node) -> bool:
        if isinstance(a, Rel) and isinstance(b, Rel):
            return False
        rel, other, gold_first = (a, b, True) if isinstance(a, Rel) else (b, a, False)
        if set(rel.ops) <= {"="} and isinstance(rel.terms[0], Seq) and isinstance(rel.terms[-1], Seq) and (
                isinstance(other, Seq) and other.kind == "list" and all(isinstance(i, Rel) for i in other.items)):
            named = [Rel([x, y], ["="]) for x, y in zip(rel.terms[0].items, rel.terms[-1].items)]
            return self.equal(Seq("list", named), other)
        label, value = self.unlabel(rel)
        if value is None:
            return self.no("an equation or inequality is not a value")
        del label
        return self.equal(value, other) if gold_first else self.equal(other, value)

    def unlabel(self, rel: Rel) -> tuple[Node | None, Node | None]:
        """(label, value) of `x = 5`, `5 = x`, `S = 2 \\cdot 3 = 6`, `x \\in \\{1, 2\\}`; (None, None) of an equation."""
        first, *rest = rel.terms
        if rel.ops == ["in"]:
            return first, rest[0]
        if set(rel.ops) != {"="}:
            return None, None
        if not is_label(first):
            if len(rest) == 1 and is_label(rest[0]) and is_constant(first):
                return rest[0], first
            values = rel.terms
            label = None
            if not all(is_constant(v) for v in values):
                return None, None
        else:
            values, label = rest, first
        if is_word_label(first) and label is not None and not is_constant(values[-1]):
            return None, None
        constants = [v for v in values if is_constant(v)]
        if not all(self.equal(v, constants[-1]) for v in constants[:-1]):
            raise Undefined("a chain of equalities contradicts itself")
        return label, values[-1]

    def both_relations(self, a: Rel, b: Rel) -> bool:
        if set(a.ops) == set(b.ops) == {"="}:
            (label_a, value_a), (label_b, value_b) = self.unlabel(a), self.unlabel(b)
            if value_a is not None and value_b is not None and label_a is not None and label_b is not None:
                if label_a == label_b and self.equal(value_a, value_b):
                    return True
                renamed = same_function(label_a, label_b)
                if renamed and self.equal(value_a, substitute(value_b, renamed)):
                    return True
        if a.ops == b.ops and len(a.terms) == len(b.terms) and all(self.equal(x, y) for x, y in zip(a.terms, b.terms)):
            return bool(set(a.ops) - {"="}) or self.is_equation(a)
        if [FLIPPED.get(op) for op in reversed(a.ops)] == b.ops and all(
                self.equal(x, y) for x, y in zip(reversed(a.terms), b.terms)):
            return True
        if len(a.terms) == len(b.terms) == 2 and a.ops[0] in FLIPPED and b.ops[0] in FLIPPED:
            ratio = self.proportion(a, b)
            if ratio is not None:
                op = b.ops[0] if ratio > 0 else FLIPPED[b.ops[0]]
                return a.ops[0] == op or self.no("the inequalities point in different directions")
            if a.ops == b.ops == ["="] and self.cleared_of_fractions(a, b):
                return True
        return self.no("the relations are not multiples of each other")

    def is_equation(self, rel: Rel) -> bool:
        """Whether an equality says something: `0 = 0` and `y = y` do not."""
        return not any(self.equal(x, y) for x, y in zip(rel.terms, rel.terms[1:]))

    def proportion(self, a: Rel, b: Rel):
        """The constant c != 0 with (left - right of a) = c (left - right of b), or None."""
        if not all(isinstance(t, Num | Sym | Op) for r in (a, b) for t in r.terms):
            return None
        sides = difference(a), difference(b)
        names, heads = map(set.union, contents(sides[0]), contents(sides[1]))
        if not names and not heads & OPAQUE:
            return None
        ratios = []
        for index in range(POINTS):
            at = Evaluator(index, bool(heads & WHOLE), self.budget)
            try:
                top, bottom = at.value(sides[0]), at.value(sides[1])
                if top == 0 or bottom == 0 or at.magnitude(top) < -3 * NOISE or at.magnitude(bottom) < -3 * NOISE:
                    return None
                ratios.append(at.op_div(top, bottom))
            except Undefined:
                continue
        if len(ratios) < 3 or not all(close(at, r, ratios[0]) for r in ratios):
            return None
        ratio = at.num(ratios[0])
        return None if isinstance(ratio, at.ctx.mpc) else ratio

    def cleared_of_fractions(self, a: Rel, b: Rel) -> bool:
        """Whether one equation is the other times a factor that makes no new solution: `y = 1/x` and `xy = 1`.

        In each symbol the quotient of the two must be constant, a power or linear, so that its zero is known; there
        the equation with the extra factor must not hold, as `x(y - 1) = 0` does besides `y = 1`.
        """
        if not all(isinstance(t, Num | Sym | Op) for r in (a, b) for t in r.terms):
            return False
        sides = difference(a), difference(b)
        return all(self.harmless_factor(sides, name, index)
                   for name in sorted(symbols(sides[0]) | symbols(sides[1])) for index in range(3))

    def harmless_factor(self, sides: tuple[Op, Op], name: str, index: int) -> bool:
        """Whether the quotient of two expressions is constant in a symbol, or has a zero that is none of theirs."""
        at = Evaluator(index, False, self.budget)
        start = sample(name, index, False)
        quotients = []
        for multiple in (1, 2, 3):
            at.env[name] = multiple * start
            quotients.append(at.op_div(at.value(sides[0]), at.value(sides[1])))
        for extra, (q1, q2, q3) in ((sides[0], quotients), (sides[1], [at.op_div(Fraction(1), q) for q in quotients])):
            if close(at, q1, q2) and close(at, q1, q3):
                return True
            if any(close(at, q2 / q1, Fraction(2) ** k) and close(at, q3 / q1, Fraction(3) ** k) for k in range(1, 5)):
                zero = Fraction(0)
            elif close(at, q2 - q1, q3 - q2):
                zero = start - start * q1 / (q2 - q1)
            else:
                continue
            at.env[name] = zero
            try:
                return not close(at, at.value(extra), Fraction(0), extra, Num(Fraction(0)))
            except Undefined:
                return self.budget[0] > 0
        return False

    # -- containers

    def containers(self, a: Node, b: Node) -> bool:
        if self.has_matrix(a) or self.has_matrix(b):
            return self.matrices(a, b)
        if isinstance(a, Seq) and isinstance(b, Seq):
            if a.kind == b.kind == "tuple":
                if a.ends != b.ends and len(a.items) == 2 or len(a.items) != len(b.items):
                    return self.no("tuples of different length, or different ends of an interval")
                return all(self.equal(x, y) for x, y in zip(a.items, b.items)) or self.no("an entry of the tuples differs")
            for x, y, flip in ((a, b, False), (b, a, True)):
                if x.kind == "tuple" and y.kind == "list" and all(isinstance(i, Rel) for i in y.items):
                    return self.named_entries(x, y, flip)
            if "tuple" in (a.kind, b.kind):
                return self.no("a tuple is not a list or set")
            return self.unordered(a, b)
        return self.no("a list, set or tuple is not a single value")

    def named_entries(self, entries: Seq, named: Seq, flip: bool) -> bool:
        """`(15, -29)` against `x=15, y=-29`: the entries in alphabetical order of their names, or as written."""
        parts = [self.unlabel(rel) for rel in named.items]
        if len(parts) != len(entries.items) or any(label is None for label, _ in parts):
            return self.no("the named values are not the entries of the tuple")
        orders = [[value for _, value in sorted(parts, key=lambda part: str(part[0]))], [value for _, value in parts]]
        for order in orders:
            pairs = zip(order, entries.items) if flip else zip(entries.items, order)
            if all(self.equal(x, y) for x, y in pairs):
                return True
        return self.no("an entry differs")

    def unordered(self, a: Seq, b: Seq) -> bool:
        left, right = list(a.items), list(b.items)
        if a.kind == "set" and b.kind == "set":
            left, right = self.distinct(left), self.distinct(right)
        if len(left) != len(right):
            return self.no(f"{len(left)} values against {len(right)}")
        if len(left) > MAX_ITEMS:
            raise Undefined("too many values")
        for item in left:
            match = next((at for at, other in enumerate(right) if self.equal(item, other)), None)
            if match is None:
                return self.no(f"nothing on the other side equals {show(item)}")
            del right[match]
        return True

    def distinct(self, items: list) -> list:
        out: list = []
        for item in items[:MAX_ITEMS]:
            if not any(self.equal(item, other) for other in out):
                out.append(item)
        return out + items[MAX_ITEMS:]

    def ratios(self, a: Node, b: Node) -> bool:
        """Equal part by part, or proportional."""
        if not isinstance(a, Ratio) or not isinstance(b, Ratio) or len(a.parts) != len(b.parts):
            return False
        if all(self.equal(x, y) for x, y in zip(a.parts, b.parts)):
            return True
        if any(isinstance(p, Op) and p.head == "..." for p in a.parts + b.parts):
            return False
        pairs = [(Op("*", (x, b.parts[0])), Op("*", (y, a.parts[0]))) for x, y in zip(a.parts[1:], b.parts[1:])]
        return all(self.equal(x, y) for x, y in pairs)

    # -- matrices

    def has_matrix(self, node: Node) -> bool:
        if isinstance(node, Op):
            return node.head in ("+", "*", "/", "neg", "^") and any(map(self.has_matrix, node.args))
        return isinstance(node, Matrix)

    def matrices(self, a: Node, b: Node) -> bool:
        rows = []
        for node in (a, b):
            if isinstance(node, Seq) and node.kind == "tuple" and node.ends in ("()", "[]"):
                nested = all(isinstance(item, Seq) and item.kind == "tuple" for item in node.items)   # [[1, 2], [3, 4]]
                node = Matrix([item.items if nested else [item] for item in node.items])
            rows.append(self.rows(node))
        if isinstance(a, Seq) or isinstance(b, Seq):                 # a vector written as a tuple: row or column
            rows = [[[cell] for cell in r[0]] if r and len(r) == 1 else r for r in rows]
        if not all(rows) or [len(r) for r in rows[0]] != [len(r) for r in rows[1]]:
            return self.no("matrices of different shape")
        pairs = [(x, y) for left, right in zip(*rows) for x, y in zip(left, right)]
        return all(self.equal(x, y) for x, y in pairs) or self.no("an entry of the matrices differs")

    def rows(self, node: Node) -> list[list] | None:
        """The entries of a matrix expression; None for a scalar."""
        if isinstance(node, Matrix):
            return node.rows if len(node.rows) * len(node.rows[0]) <= MAX_ITEMS else None
        if not isinstance(node, Op) or not self.has_matrix(node):
            return None
        parts = [self.rows(arg) for arg in node.args]
        head, args = node.head, node.args
        if head == "neg":
            return [[Op("neg", (cell,)) for cell in row] for row in parts[0]]
        if head == "+" and all(parts) and len({(len(p), len(p[0])) for p in parts}) == 1:
            return [[Op("+", cells) for cells in zip(*rows)] for rows in zip(*parts)]
        if head == "/" and parts[0] and not parts[1]:
            return [[Op("/", (cell, args[1])) for cell in row] for row in parts[0]]
        if head == "*":
            scalars = tuple(arg for arg, part in zip(args, parts) if part is None)
            matrices = [part for part in parts if part]
            if len(matrices) == 1:
                return [[Op("*", (*scalars, cell)) for cell in row] for row in matrices[0]]
            if len(matrices) == 2 and not scalars and len(matrices[0][0]) == len(matrices[1]):
                columns = list(zip(*matrices[1]))
                return [[Op("+", tuple(Op("*", pair) for pair in zip(row, column))) for column in columns]
                        for row in matrices[0]]
        if head == "^" and parts[0] and args[1] in TRANSPOSED:
            return [list(column) for column in zip(*parts[0])]
        return None

    def sets_equal(self, a: tuple, b: tuple) -> bool:
        if a[0] and b[0] and a[0] != b[0]:
            return self.no("the inequalities are about different variables")
        a, b = self.line.union(a[1]), self.line.union(b[1])
        if len(a) != len(b):
            return False
        for (low_a, *closed_a, high_a, end_a), (low_b, *closed_b, high_b, end_b) in zip(a, b):
            if closed_a != closed_b or end_a != end_b:
                return False
            for x, y in ((low_a, low_b), (high_a, high_b)):
                if (x is None) != (y is None) or x is not None and not self.scalars(x, y):
                    return False
        return True

    # -- scalars

    def scalars(self, a: Node, b: Node) -> bool:
        """Whether two numbers or expressions are equal."""
        if not isinstance(a, Num | Sym | Op) or not isinstance(b, Num | Sym | Op):
            return self.no("one is a value, the other is not")
        if isinstance(a, Num) and isinstance(b, Num):
            return a.value == b.value or self.no("different rational numbers")
        if infinity(a) or infinity(b):
            return infinity(a) == infinity(b) or self.no("only one is infinite")
        percents = [isinstance(n, Op) and n.head == "percent" for n in (a, b)]
        if any(percents):
            return self.percents(a, b, percents)
        if self.same_value(a, b):
            return True
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Op) and x.head == "degree" and "pi" in contents(y)[1] and "degree" not in contents(y)[1]:
                return self.same_value(Op("radians", x.args), y)
        stripped = without_letter_unit(b)
        if stripped is not None and not symbols(a):
            return self.same_value(a, stripped)
        return self.no("the values differ")

    def percents(self, a: Node, b: Node, percents: list[bool]) -> bool:
        if all(percents):
            return self.scalars(a.args[0], b.args[0])
        number, other = (a.args[0], b) if percents[0] else (b.args[0], a)
        if self.same_value(Op("percent", (number,)), other):
            return True
        at = Evaluator(0, False, self.budget)
        dropped = not symbols(number) and abs(at.num(at.value(number))) >= 1 and self.same_value(number, other)
        return dropped or self.no("p% is p/100")

    def same_value(self, a: Node, b: Node) -> bool:
        """Equality at random points, exact wherever the values are rational."""
        if a == b:
            return True
        names, heads = map(set.union, contents(a), contents(b))
        if not names and not heads & OPAQUE:
            at = Evaluator(0, False, self.budget)
            try:
                x, y = at.value(a), at.value(b)
            except Undefined as error:
                return self.no(f"no value: {error}")
            return close(at, x, y, a, b) or self.literal(at, x, y, a, b)
        whole = bool(heads & WHOLE) or negative_base(a) or negative_base(b)
        one_absolute = ("abs" in contents(a)[1]) != ("abs" in contents(b)[1])
        complex_allowed = "i" in heads
        good = complex_good = 0
        complex_bad = False
        points = POINTS
        if whole and not heads & {"sum", "prod"}:
            points = WHOLE_POINTS if heads & STEPS else 2 * POINTS
        for index in range(points):
            if complex_allowed and index >= 4 and not whole:
                break                                       # branch cuts: explicit i, positive symbols only
            at = Evaluator(index, whole, self.budget)
            try:
                (x, real_x), (y, real_y) = at.value_and_real(a), at.value_and_real(b)
            except Undefined:
                if self.budget[0] < 0:
                    raise
                continue
            same = close(at, x, y, a, b)
            if one_absolute and real_x != real_y:               # ln|x| and ln x: an absolute value widens the domain
                return False
            if complex_allowed or real_x and real_y:
                if not same:
                    return False
                good += 1
            else:
                complex_good, complex_bad = complex_good + same, complex_bad or not same
        return good >= 2 or complex_good >= 2 and not complex_bad

    def literal(self, at: Evaluator, x, y, a: Node, b: Node) -> bool:
        """A decimal literal of at least `LITERAL_DIGITS` digits against an exact value that it rounds to."""
        for node, other in ((a, b), (b, a)):
            if isinstance(node, Num) and node.digits >= LITERAL_DIGITS and not (isinstance(other, Num)):
                difference, size = abs(at.num(x) - at.num(y)), abs(at.num(node.value))
                unit = at.ctx.mpf(10) ** (int(at.ctx.floor(at.ctx.log10(size))) + 1 - node.digits)
                if difference <= unit:
                    return True
        return False
