"""Stage 4 of the answer checker, second third: two expressions, or two equations, compared by their values.

Equal are the same number (exactly where both are rational, else to 40 digits *relative* to their size) or, with
symbols, the same numbers at several random points. Points where a side has no value, or leaves the reals, are no
evidence unless there is no other.

Where numbers are of such different size that 60 digits hide one (pi + 10^-50), more are taken. Where values do not
tell, sympy's canonical forms do (see `sympy_form`): where neither side has values, for sums and integrals in different
variables. What neither tells is not equal.
"""

from __future__ import annotations

from fractions import Fraction

from nano_exgrpo.checker.arithmetic import DIGITS, NOISE, Undefined
from nano_exgrpo.checker.evaluator import Evaluator, close, sample
from nano_exgrpo.checker.tree import (
    Node,
    Num,
    Op,
    Rel,
    Sym,
    children,
    contents,
    infinity,
    letter_quantity,
    negative_base,
    rebuilt,
    show,
    symbols,
)

POINTS = 7  # random points for expressions with symbols
WHOLE_POINTS = 41  # whole numbers for expressions with floors: all from 1 to 41
MAX_TURNS = 3  # numerals, and symbols, of which turning points are tried
MAX_FORMS = 2  # comparisons of sympy forms in one verdict; one takes 1 to 80 milliseconds
LITERAL_DIGITS = 12  # a decimal literal of so many right digits stands for the exact value
MAX_DIGITS = 2_000  # in which numbers of very different size are compared
STEPS = {"floor", "ceil", "mod"}
TURNS = STEPS | {"abs", "min", "max", "sgn", "sqrt", "root", "gcd", "lcm", "binom"}  # ... at numbers that occur in them
ANGLES = {"pi", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"}  # they show that an angle is in radians
WHOLE = STEPS | {"factorial", "factorial2", "binom", "sum", "prod", "gcd", "lcm"}  # mean little off the integers
BIG = {"sum", "prod", "int", "lim"}
OPAQUE = {"call", "sub", "int", "lim", "sum", "prod"}  # have random values (see `values`)


def difference(rel: Rel) -> Op:
    """Left side minus right side."""
    return Op("+", (rel.terms[0], Op("neg", (rel.terms[1],))))


def in_radians(node: Node) -> Node:
    """The tree with its degrees converted."""
    head = "radians" if isinstance(node, Op) and node.head == "degree" else ""
    return Op(head, node.args) if head else rebuilt(node, in_radians)


def named(node: Node) -> Node:
    """The tree with a symbol for each x_1, f(2), integral, ...: unknowns like others where an equation is solved."""
    return Sym(show(node)) if isinstance(node, Op) and node.head in OPAQUE else rebuilt(node, named)


def bound_variables(tree: Node) -> set[str]:
    """The names of the variables of sums, products, limits and integrals."""
    names = set().union(*map(bound_variables, children(tree)))
    if isinstance(tree, Op) and tree.head in BIG:
        low, _, body = tree.args
        if isinstance(low, Rel):
            names |= symbols(low.terms[0])
        elif isinstance(body, Op) and body.args and isinstance(body.args[-1], Sym):
            names.add(body.args[-1].name)  # dx
    return names


def turning_points(*trees: Node) -> list[tuple[int, dict[str, Fraction]]]:
    """Points at and beyond the numbers that occur in some trees, for one symbol at a time: where |x - 10| turns and
    floor(n / 2024) steps, which random points of size one never see."""
    names, heads = map(set.union, *map(contents, trees)) if len(trees) > 1 else contents(trees[0])
    if not heads & TURNS:
        return []
    sizes = sorted({abs(v) for tree in trees for v in literals(tree) if 2 < abs(v) <= 10**6}, reverse=True)[:MAX_TURNS]
    if heads & WHOLE:
        values = [v for size in sizes if size.denominator == 1 for v in (size, size + 1, 2 * size + 1)]
    else:
        values = [v for size in sizes for v in (size + 1, 3 * size, -size - 1, -3 * size)]
    return [(at % POINTS, {name: value}) for name in sorted(names)[:MAX_TURNS] for at, value in enumerate(values)]


def literals(tree: Node) -> list[Fraction]:
    """The numerals in a tree."""
    found = [value for child in children(tree) for value in literals(child)]
    return [tree.value, *found] if isinstance(tree, Num) else found


class Comparison:
    """The comparisons of one verdict; `budget` is the work left to it, `why` says what decided it."""

    def __init__(self, budget: list[int]):
        self.budget = budget
        self.forms = 0
        self.why = ""

    def no(self, why: str) -> bool:
        self.why = why  # the outermost reason is noted last
        return False

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
            if "degree" in contents(x)[1] and "degree" not in contents(y)[1] and contents(y)[1] & ANGLES:
                return self.same_value(in_radians(x), y)
        stripped = letter_quantity(b)
        if stripped is not None and not symbols(a):
            return self.same_value(a, stripped.value)
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
        """Whether two scalars are equal: by their values, and by their sympy forms where values do not tell."""
        if a == b:
            return True
        names, heads = map(set.union, contents(a), contents(b))
        if names or heads & OPAQUE:
            same, sure = self.at_random_points(a, b, heads)
        else:
            same, sure = self.constants(a, b)
        if sure:
            return bool(same)
        return bool(self.same_form(a, b))

    def constants(self, a: Node, b: Node) -> tuple[bool, bool]:
        """(whether two constants are equal, whether that is sure)."""
        at = Evaluator(0, False, self.budget)
        try:
            x, y = at.value(a), at.value(b)
        except Undefined as error:
            return self.no(f"no value: {error}"), True
        if close(at, x, y, a, b):
            same = self.shown(at, a, b) if at.may_hide_digits else True
            return same, same is not None
        return self.literal(at, x, y, a, b), True

    def shown(self, at: Evaluator, a: Node, b: Node) -> bool | None:
        """Whether two values are equal in so many digits that the smallest number met shows beside the largest; None if
        those would be too many."""
        digits = DIGITS + (at.largest - at.smallest) * 3 // 10
        if digits > MAX_DIGITS:
            return None
        finer = Evaluator(at.index, at.whole, self.budget, digits, dict(at.env))
        try:
            x, y = finer.value(a), finer.value(b)
        except Undefined:
            if self.budget[0] < 0:
                raise
            return None
        return abs(finer.num(x) - finer.num(y)) <= finer.ctx.mpf(2) ** at.smallest * finer.ctx.mpf(10) ** -NOISE

    def at_random_points(self, a: Node, b: Node, heads: set[str]) -> tuple[bool, bool]:
        """(whether two expressions are equal at random points, whether that is sure)."""
        heads_a, heads_b = contents(a)[1], contents(b)[1]
        whole = bool(heads & WHOLE) or negative_base(a) or negative_base(b)
        one_absolute = ("abs" in heads_a) != ("abs" in heads_b)
        variables = bound_variables(a), bound_variables(b)
        different = False, not all(variables) or variables[0] == variables[1]
        complex_allowed = "i" in heads
        good = complex_good = 0
        complex_bad = hidden = one_sided = False
        points = POINTS
        if whole and not heads & {"sum", "prod"}:
            points = WHOLE_POINTS if heads & STEPS else 2 * POINTS
        if complex_allowed and not whole:
            places = [(index, {}) for index in range(4)]  # branch cuts: explicit i, positive symbols only
        else:
            places = [*((index, {}) for index in range(points)), *turning_points(a, b)]
        for index, env in places:
            at = Evaluator(index, whole, self.budget, env=dict(env))
            (x, real_x), (y, real_y) = self.value(at, a), self.value(at, b)
            if x is None or y is None:
                one_sided = one_sided or x is not y
                continue
            same = close(at, x, y, a, b)
            if same and at.may_hide_digits:
                same = self.shown(at, a, b)
                hidden = hidden or same is None
                same = same is not False
            if one_absolute and real_x != real_y:  # ln|x| and ln x: an absolute value widens the domain
                return False, True
            if complex_allowed or real_x and real_y:
                if not same:
                    return different
                good += 1
            else:
                complex_good, complex_bad = complex_good + same, complex_bad or not same
        if good >= 2 or complex_good >= 2 and not complex_bad:
            return True, not hidden
        return False, complex_bad or one_sided

    def value(self, at: Evaluator, node: Node) -> tuple:
        """(value, whether it is real) at a point; (None, False) where there is none."""
        try:
            return at.value_and_real(node)
        except Undefined:
            if self.budget[0] < 0:
                raise
            return None, False

    def same_form(self, a: Node, b: Node) -> bool | None:
        """The verdict of sympy's canonical forms, asked at most `MAX_FORMS` times."""
        from nano_exgrpo.checker.sympy_form import same_form  # sympy takes a moment to import

        self.forms += 1
        return same_form(a, b) if self.forms <= MAX_FORMS else None

    def literal(self, at: Evaluator, x, y, a: Node, b: Node) -> bool:
        """A decimal literal of at least `LITERAL_DIGITS` digits against an exact value that it rounds to."""
        for node, other in ((a, b), (b, a)):
            if isinstance(node, Num) and node.digits >= LITERAL_DIGITS and not (isinstance(other, Num)):
                difference, size = abs(at.num(x) - at.num(y)), abs(at.num(node.value))
                unit = at.ctx.mpf(10) ** (int(at.ctx.floor(at.ctx.log10(size))) + 1 - node.digits)
                if difference <= unit:
                    return True
        return False

    # -- equations and inequalities

    def proportion(self, a: Rel, b: Rel):
        """The constant c != 0 with (left - right of a) = c (left - right of b), or None."""
        if not all(isinstance(t, Num | Sym | Op) for r in (a, b) for t in r.terms):
            return None
        sides = difference(a), difference(b)
        names, heads = map(set.union, contents(sides[0]), contents(sides[1]))
        if not names and not heads & OPAQUE:
            return None
        ratios = []
        for index, env in [*((index, {}) for index in range(POINTS)), *turning_points(*sides)]:
            at = Evaluator(index, bool(heads & WHOLE), self.budget, env=dict(env))
            try:
                top, bottom = at.value(sides[0]), at.value(sides[1])
                if top == 0 or bottom == 0 or at.magnitude(top) < -3 * NOISE or at.magnitude(bottom) < -3 * NOISE:
                    return None
                ratios.append(at.op_div(top, bottom))
                if at.may_hide_digits:
                    return None
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
        sides = named(difference(a)), named(difference(b))
        if symbols(sides[0]) != symbols(sides[1]):
            return False
        names = sorted(symbols(sides[0]))
        return bool(names) and all(self.harmless_factor(sides, name, index) for name in names for index in range(3))

    def harmless_factor(self, sides: tuple[Op, Op], name: str, index: int) -> bool:
        """Whether the quotient of two expressions is constant in a symbol, or has a zero that is none of theirs."""
        at = Evaluator(index, False, self.budget)
        start = sample(name, index, False)
        quotients = []
        for multiple in (1, 2, 3):
            at.env[name] = multiple * start
            quotients.append(at.op_div(at.value(sides[0]), at.value(sides[1])))
        if at.may_hide_digits:
            return False
        if not all(isinstance(q, Fraction) for q in quotients):
            start, *quotients = map(at.num, (start, *quotients))
        for extra, (q1, q2, q3) in ((sides[0], quotients), (sides[1], [at.op_div(Fraction(1), q) for q in quotients])):
            if close(at, q1, q2) and close(at, q1, q3):
                return True
            if any(close(at, q2, 2**k * q1) and close(at, q3, 3**k * q1) for k in range(1, 5)):
                zero = Fraction(0)
            elif close(at, q2 - q1, q3 - q2):
                zero = start - start * q1 / (q2 - q1)
            else:
                continue
            at.env[name] = zero
            try:  # the zero may be rounded: so is the value there
                value = at.value(extra)
                return value != 0 and at.magnitude(value) > -2 * NOISE
            except Undefined:
                return self.budget[0] > 0
        return False
