"""Tree -> number: the value of a tree at one point, within bounds.

`Evaluator.value(node)` walks a tree; what each operation does stands in `functions`. Symbols take rational values
from a point. What has no known value (an unknown function `f(3)`, a subscripted family `a_{n-1}`, an integral) takes
a pseudo-random value that depends on its name and on the values of its arguments only: two expressions that agree at
random points for random functions are equal as expressions (Schwartz-Zippel).

Every step is paid from a budget. Nothing is shared between threads: each has its own arithmetic context.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from fractions import Fraction
from functools import lru_cache

from nano_exgrpo.checker.functions import (
    ANY,
    DIGITS,
    FUNCTIONS,
    MAX_BITS,
    MAX_LOG2,
    NOISE,
    Undefined,
    Value,
    add,
    is_whole,
    multiply,
)
from nano_exgrpo.checker.tree import FUNCTION_LETTERS, Matrix, Node, Num, Op, Rel, Seq, Sym, contents, infinity, rebuilt

MAX_TERMS = 1_000  # of a sum or product that is written out
TERMS = 64  # of an infinite sum or product
HALVINGS = 16  # points that approach a limit
EXTRA_DIGITS = 180  # precision of an extrapolation

_local = threading.local()


def context(digits: int):
    """This thread's mpmath context of the given precision."""
    contexts = _local.__dict__.setdefault("contexts", {})
    if digits not in contexts:
        from mpmath import MPContext  # a part of every sympy installation

        contexts[digits] = MPContext()
        contexts[digits].dps = digits
    return contexts[digits]


@lru_cache(maxsize=8192)
def sample(name: str, index: int, whole: bool) -> Fraction:
    """The value of symbol `name` at point `index`: positive, from index 4 on of either sign.

    If `whole`, a positive integer that runs through 1 to 41 with the index, in an order of the symbol's own; letters
    that name real numbers by custom stay real.
    """
    if whole and name[:1] not in "xyztuvwrs":
        rng = random.Random(name)
        return Fraction((rng.randint(1, 40) * index + rng.randint(0, 40)) % 41 + 1)
    value = Fraction(random.Random(f"{name}/{index}").randint(300, 4000), 1009)
    negative = index >= 4 and (index + random.Random(name).randint(0, 1)) % 2
    return -value if negative else value


class Evaluator:
    """Values of trees at one point.

    Args:
        index: which random point; a symbol's value depends on its name and on this.
        whole: take whole numbers (floors, factorials and sums mean little elsewhere).
        budget: a one-element list of work units left, shared by all evaluations of a verdict.
        digits: the precision of inexact numbers.
        env: values of symbols that are set, not random.
    """

    def __init__(self, index: int, whole: bool, budget: list[int], digits: int = DIGITS, env: dict | None = None):
        self.index, self.whole, self.budget, self.digits = index, whole, budget, digits
        self.env: dict[str, Fraction] = env or {}
        self.ctx = context(digits)
        self.left_reals = False  # whether a function left the real numbers
        self.smallest = self.largest = 0  # binary magnitudes of the inexact numbers met

    # -- numbers and what they cost

    def num(self, value: Value) -> Value:
        """`value` as a number of the context."""
        if isinstance(value, Fraction):
            if value:
                self.measure(self.magnitude(value))
            return self.ctx.mpf(value.numerator) / value.denominator
        return value

    def real(self, value: Value) -> Value:
        if isinstance(value, self.ctx.mpc):
            raise Undefined("not real")
        return value

    def magnitude(self, value: Value) -> int:
        """About log2 |value|."""
        if isinstance(value, Fraction):
            return value.numerator.bit_length() - value.denominator.bit_length()
        mag = self.ctx.mag(value)
        return int(mag) if self.ctx.isfinite(mag) else 0

    def measure(self, magnitude: int) -> None:
        self.smallest, self.largest = min(self.smallest, magnitude), max(self.largest, magnitude)

    @property
    def may_hide_digits(self) -> bool:
        """Whether numbers of such different sizes were met that the sum of two shows nothing of the smaller one."""
        return self.largest - self.smallest > 2.5 * NOISE

    def spend(self, cost: int) -> None:
        self.budget[0] -= cost * max(1, self.digits // DIGITS)
        if self.budget[0] < 0:
            raise Undefined("too much work")

    def spend_bits(self, a: Fraction, b: Fraction) -> None:
        """The cost of exact arithmetic: greatest common divisors are quadratic in the number of bits."""
        bits = max(part.bit_length() for number in (a, b) for part in (number.numerator, number.denominator))
        if bits > 2_000:
            self.spend((bits // 1_000) ** 2 // 4)

    def checked(self, value: Value) -> Value:
        """`value`, if it is finite and not too large; real if its imaginary part is zero."""
        if isinstance(value, Fraction):
            if value.numerator.bit_length() + value.denominator.bit_length() > 2 * MAX_BITS:
                raise Undefined("too large")
            return value
        if not self.ctx.isfinite(value):
            raise Undefined("not finite")
        if isinstance(value, self.ctx.mpc) and value.imag == 0:
            value = value.real
        magnitude = self.magnitude(value)
        if abs(magnitude) > MAX_LOG2:
            raise Undefined("too large")
        if value != 0:
            self.measure(magnitude)
        return value

    def noted(self, result: Value, *arguments: Value) -> Value:
        """`result`, noting whether a function of real numbers left the reals (outside its usual domain)."""
        if isinstance(result, self.ctx.mpc) and not any(isinstance(a, self.ctx.mpc) for a in arguments):
            self.left_reals = True
        return result

    # -- trees

    def value(self, node: Node) -> Value:
        """The value of a scalar tree.

        Raises:
            Undefined: no value here (a pole, 0/0, log 0, a container, a bound reached).
        """
        self.spend(1)
        if isinstance(node, Num):
            return node.value
        if isinstance(node, Sym):
            if node.name.startswith("text "):
                raise Undefined("a word has no value")
            found = self.env.get(node.name)
            return sample(node.name, self.index, self.whole) if found is None else found
        if not isinstance(node, Op):
            raise Undefined("not a number")
        head, args = node.head, node.args
        if head in ("sum", "prod", "int", "lim"):
            return self.big(head, *args)
        if head == "det":
            return self.determinant(args[0])
        if head in ("call", "sub"):
            return self.opaque(node)
        function = FUNCTIONS.get(head)
        if function is None or function.value is None or function.arity not in (len(args), ANY):
            raise Undefined(f"{head} has no value")
        values = [self.value(arg) for arg in args]
        try:
            return self.checked(function.value(self, *values))
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise Undefined(f"{head}: {error}") from None  # complex order, a pole

    def value_and_real(self, node: Node) -> tuple[Value, bool]:
        """The value of a tree, and whether all of it stays real, roots and logarithms included."""
        self.left_reals = False
        value = self.value(node)
        return value, not self.left_reals and not isinstance(value, self.ctx.mpc)

    # -- what has no arithmetic of its own

    def random_value(self, *key: str) -> Fraction:
        """As of a symbol whose name is the key. One for all points would make x_1 = 3 a multiple of x_1 = 4."""
        return sample(hashlib.blake2b("\x00".join(key).encode(), digest_size=8).hexdigest(), self.index, False)

    def key(self, node: Node | str) -> str:
        """A string that stands for the value of an argument."""
        if isinstance(node, str):
            return node
        if isinstance(node, Seq):
            return ",".join(map(self.key, node.items))
        if isinstance(node, Rel):
            return "".join(node.ops) + ",".join(map(self.key, node.terms))
        if isinstance(node, Op) and node.head in ("...", "inf", "reals"):
            return node.head
        value = self.value(node)
        if is_whole(value) and abs(value) < 10**15:
            return str(value.numerator)
        return self.ctx.nstr(self.num(value), 20).removesuffix(".0")

    def opaque(self, node: Op) -> Value:
        """A call or a subscripted symbol: a random function of the values of its arguments."""
        name, *args = node.args
        if node.head == "call" and len(args) == 1 and isinstance(name, Sym) and isinstance(args[0], Sym):
            if name.name[:1] not in FUNCTION_LETTERS and "'" not in name.name:
                return multiply(self, self.value(name), self.value(args[0]))  # u(t): alike as a call or as a product
        title = name if isinstance(name, str) else name.name if isinstance(name, Sym) else self.key(name)
        return self.random_value(node.head, title, *map(self.key, args))

    def big(self, head: str, low: Node, high: Node, body: Node) -> Value:
        """Sums and products of few terms are written out; the others, integrals and limits are opaque."""
        if isinstance(low, Rel) and low.ops == ["="] and isinstance(low.terms[0], Sym | Op):
            variable = low.terms[0].name if isinstance(low.terms[0], Sym) else low.terms[0].head
            low = low.terms[1]
            if head in ("sum", "prod") and not (isinstance(high, Op) and high.head == "inf"):
                start, stop = self.value(low), self.value(high)
                if is_whole(start) and is_whole(stop) and stop - start < MAX_TERMS:
                    return self.written_out(head, variable, range(int(start), int(stop) + 1), body)
        return self.random_value(head, self.key(low), self.key(high), self.key(body))

    def written_out(self, head: str, variable: str, numbers: range, body: Node) -> Value:
        combine = add if head == "sum" else multiply
        total, outer = Fraction(head == "prod"), dict(self.env)
        for k in numbers:
            self.env[variable] = Fraction(k)
            total = self.checked(combine(self, total, self.value(body)))
        self.env = outer
        return total

    def determinant(self, matrix: Node) -> Value:
        rows = matrix.rows if isinstance(matrix, Matrix) else []
        if not rows or len(rows) != len(rows[0]) or len(rows) > 5:
            raise Undefined("no determinant")
        return self.checked(self.minor([[self.value(cell) for cell in row] for row in rows]))

    def minor(self, rows: list[list[Value]]) -> Value:
        if len(rows) == 1:
            return rows[0][0]
        total = Fraction(0)
        for at, cell in enumerate(rows[0]):
            part = multiply(self, cell, self.minor([row[:at] + row[at + 1 :] for row in rows[1:]]))
            total = add(self, total, -part if at % 2 else part)
        return total


def close(at: Evaluator, x: Value, y: Value, a: Node | None = None, b: Node | None = None) -> bool:
    """Whether two values are the same number, of any size: relative difference below 10^-NOISE.

    Where both nearly vanish, rounding could hide a difference or a zero: their trees `a` and `b` are evaluated again
    with more than twice the digits, and a value that shrinks with the precision is zero.
    """
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    tiny = -3 * NOISE  # in bits, above 10^-NOISE
    if a is not None and b is not None and all(v == 0 or at.magnitude(v) < tiny for v in (x, y)):
        at = Evaluator(at.index, at.whole, at.budget, 2 * DIGITS + 20, dict(at.env))
        x, y = at.value(a), at.value(b)
        zero = [v == 0 or not isinstance(v, Fraction) and at.magnitude(v) < -8 * NOISE for v in (x, y)]
        if any(zero):
            return all(zero)
    x, y = at.num(x), at.num(y)
    return abs(x - y) <= max(abs(x), abs(y)) * at.ctx.mpf(10) ** -NOISE


# ------------------------------------------------------------------------------- infinite sums, products and limits


def settled(node: Node, budget: list[int]) -> Node:
    """The tree with infinite sums, products and limits as numbers, where no symbol is free and they clearly converge.

    A sum or product is extrapolated from its first terms by Levin's u-transform. A limit is extrapolated by
    Richardson's scheme from points that approach it by halves.
    """
    node = rebuilt(node, lambda child: settled(child, budget))
    if not isinstance(node, Op) or node.head not in ("sum", "prod", "lim") or not isinstance(node.args[0], Rel):
        return node
    low, high, body = node.args
    variable = low.terms[0].name if isinstance(low.terms[0], Sym) else "i" if low.terms[0] == Op("i") else None
    names, heads = contents(body)
    if names - {variable} or heads & {"call", "sub", "int", "...", "inf"} or len(low.terms) != 2:
        return node
    at = Evaluator(0, True, budget, EXTRA_DIGITS)
    try:
        if node.head == "lim" and low.ops == ["->"]:
            value = limit(at, variable, low.terms[1], body)
        elif infinity(high) > 0 and low.ops == ["="]:
            value = infinite(at, variable, at.value(low.terms[1]), body, node.head)
        else:
            return node
        scale = 2 ** (3 * EXTRA_DIGITS)
        return Op("approximate", (Num(Fraction(int(at.ctx.nint(at.real(value) * scale)), scale)),))
    except Undefined:
        return node


def agreed(at: Evaluator, first: Value, second: Value, scale: Value) -> Value:
    """The second of two extrapolations from numbers of some size, if it agrees with the first beyond `NOISE` digits."""
    noise = at.ctx.mpf(10) ** -(NOISE + 4) * scale
    if not at.ctx.isfinite(second) or abs(first - second) > noise:
        raise Undefined("no limit in sight")
    return at.ctx.mpf(0) if abs(second) < noise else second


def limit(at: Evaluator, variable: str, point: Node, body: Node) -> Value:
    found, scale = [], at.ctx.mpf(0)
    for sign in (infinity(point),) if infinity(point) else (1, -1):
        rows: list[list[Value]] = []
        for k in range(4, 4 + HALVINGS):
            step = sign * Fraction(2) ** (k if infinity(point) else -k)
            at.env[variable] = step if infinity(point) else add(at, at.value(point), step)
            row = [at.num(at.value(body))]
            for m, before in enumerate(rows[-1] if rows else [], 1):
                row.append(row[-1] + (row[-1] - before) / (2**m - 1))
            rows.append(row)
        scale = max(abs(row[0]) for row in rows)
        found.append(agreed(at, rows[-2][-1], rows[-1][-1], scale))
    return agreed(at, found[0], found[-1], scale)


def infinite(at: Evaluator, variable: str, start: Value, body: Node, head: str) -> Value:
    if not is_whole(start):
        raise Undefined("a sum from no whole number")
    total, parts, terms = at.ctx.mpf(head == "prod"), [], []
    for k in range(TERMS):
        at.env[variable] = start + k
        term = at.num(at.value(body))
        terms.append(term if head == "sum" else total * (term - 1))
        total = at.ctx.mpf(total + terms[-1])
        parts.append(total)
        if k > 3 and abs(terms[-1]) * 10 ** (EXTRA_DIGITS // 2) < abs(total) and abs(terms[-1]) * 2 < abs(terms[-2]):
            return total
    if any(term == 0 for term in terms):
        raise Undefined("terms that vanish")
    alternating = all((x > 0) != (y > 0) for x, y in zip(terms, terms[1:]))
    if abs(terms[-1]) > abs(terms[TERMS // 2 - 1]) * (0.95 if alternating else 0.48):  # 1/n: one half
        raise Undefined("the terms vanish too slowly")
    return agreed(at, levin(at, parts[:-8], terms[:-8]), levin(at, parts, terms), max(map(abs, parts)))


def levin(at: Evaluator, parts: list[Value], terms: list[Value]) -> Value:
    """Levin's u-transform of partial sums, from their terms."""
    last = len(parts) - 1
    weights = [(-1) ** j * math.comb(last, j) * (j + 1) ** (last - 2) / term for j, term in enumerate(terms)]
    return at.ctx.fdot(zip(weights, parts)) / at.ctx.fsum(weights)
