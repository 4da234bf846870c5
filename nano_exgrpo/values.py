"""Stage 3 of the answer checker: the number that a tree stands for.

`Evaluator.value(node)` gives an exact `Fraction` wherever the arithmetic stays rational, else a complex or real
number to `DIGITS` digits (mpmath, sympy's own arithmetic). Symbols take rational values from a point. What has no
known value (an unknown function `f(3)`, a subscripted family `a_{n-1}`, an integral) takes a pseudo-random value
that depends on its name and on the values of its arguments only: two expressions that agree at random points for
random functions are equal as expressions (Schwartz-Zippel).

Bounds before work. Every power, factorial, binomial, sum and function states its cost before it is computed, from
the magnitudes of its arguments; one too large, or one evaluation too many, raises `Undefined`. No input can start
anything long. Nothing here is shared between threads: each has its own arithmetic context.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from fractions import Fraction
from functools import lru_cache

from nano_exgrpo.expressions import CALLED
from nano_exgrpo.tree import Matrix, Node, Num, Op, Rel, Seq, Sym

DIGITS = 60                 # working precision in decimal digits
MAX_BITS = 20_000           # of exact integers
MAX_LOG2 = 2_000_000        # of the magnitude of inexact numbers
MAX_TERMS = 120             # of a sum or product that is written out
NOISE = 40                  # a value below 10^-NOISE is looked at again with twice the digits

_local = threading.local()


class Undefined(ArithmeticError):
    """The expression has no value at this point, or none that the bounds allow to compute."""


def context(digits: int = DIGITS):
    """This thread's mpmath context of the given precision."""
    contexts = _local.__dict__.setdefault("contexts", {})
    if digits not in contexts:
        from mpmath import MPContext                      # a part of every sympy installation

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
    """

    def __init__(self, index: int, whole: bool, budget: list[int], digits: int = DIGITS, env: dict | None = None):
        self.index, self.whole, self.budget = index, whole, budget
        self.env: dict[str, Fraction] = env or {}
        self.digits = digits
        self.left_reals = False
        self.ctx = context(digits)

    # -- numbers

    def num(self, value):
        """`value` as a number of the context."""
        if isinstance(value, Fraction):
            return self.ctx.mpf(value.numerator) / value.denominator
        return value

    def spend(self, cost: int) -> None:
        self.budget[0] -= cost
        if self.budget[0] < 0:
            raise Undefined("too much work")

    def spend_bits(self, a: Fraction, b: Fraction) -> None:
        """The cost of exact arithmetic: greatest common divisors are quadratic in the number of bits."""
        bits = max(part.bit_length() for number in (a, b) for part in (number.numerator, number.denominator))
        if bits > 2_000:
            self.spend((bits // 1_000) ** 2 // 4)

    def magnitude(self, value) -> int:
        """About log2 |value|."""
        if isinstance(value, Fraction):
            return value.numerator.bit_length() - value.denominator.bit_length()
        mag = self.ctx.mag(value)
        return int(mag) if self.ctx.isfinite(mag) else 0

    def checked(self, value):
        """`value`, if it is finite and not too large; real if its imaginary part is zero."""
        if isinstance(value, Fraction):
            if value.numerator.bit_length() + value.denominator.bit_length() > 2 * MAX_BITS:
                raise Undefined("too large")
            return value
        if not self.ctx.isfinite(value):
            raise Undefined("not finite")
        if isinstance(value, self.ctx.mpc) and value.imag == 0:
            value = value.real
        if abs(self.magnitude(value)) > MAX_LOG2:
            raise Undefined("too large")
        return value

    # -- the tree

    def value(self, node: Node):
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
        if head == "call" or head == "sub":
            return self.opaque(node)
        rule = getattr(self, "op_" + NAMES.get(head, head), None)
        values = [self.value(arg) for arg in args]
        try:
            return self.checked(rule(*values) if rule else self.function(head, *values))
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise Undefined(f"{head}: {error}") from None        # too few arguments, complex order, a pole

    def value_and_real(self, node: Node):
        """The value of a tree, and whether all of it stays real: no complex value, no root or logarithm outside its domain."""
        self.left_reals = False
        value = self.value(node)
        return value, not self.left_reals and not isinstance(value, self.ctx.mpc)

    def op_add(self, *values):
        if all(isinstance(v, Fraction) for v in values):
            total = values[0]
            for value in values[1:]:
                self.spend_bits(total, value)
                total = self.checked(total + value)
            return total
        return sum(map(self.num, values[1:]), self.num(values[0]))

    def op_neg(self, a):
        return -a

    def op_mul(self, *values):
        product = values[0]
        for value in values[1:]:
            if isinstance(product, Fraction) and isinstance(value, Fraction):
                self.spend_bits(product, value)
                product = self.checked(product * value)
            else:
                product = self.num(product) * self.num(value)
        return product

    def op_div(self, a, b):
        if b == 0:
            raise Undefined("division by zero")
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            self.spend_bits(a, b)
            return a / b
        return self.num(a) / self.num(b)

    def op_mixed(self, whole, part):
        return whole + part

    def op_percent(self, a):
        return self.op_div(a, Fraction(100))

    def op_degree(self, a):
        return a

    def op_radians(self, a):
        self.spend(2)
        return self.num(a) * self.ctx.pi / 180

    def op_pi(self):
        return +self.ctx.pi

    def op_e(self):
        return +self.ctx.e

    def op_i(self):
        return self.env["i"] if "i" in self.env else self.ctx.mpc(0, 1)      # a bound variable if a sum says so

    def op_pow(self, a, b):
        if isinstance(b, Fraction):
            if a == 0:
                if b <= 0:
                    raise Undefined("0 to a power that is not positive")
                return Fraction(0)
            if isinstance(a, Fraction):
                if b.denominator == 1:
                    size = abs(b.numerator) * (a.numerator.bit_length() + a.denominator.bit_length())
                    if abs(a) == 1 or size <= MAX_BITS:
                        self.spend(1 + (size >> 10))
                        return a ** (b.numerator % 2 if abs(a) == 1 else b.numerator)
                elif a > 0 and b.denominator <= 64:
                    root = exact_root(a, b.denominator)
                    if root is not None:
                        return self.op_pow(root, Fraction(b.numerator))
        elif a == 0:
            raise Undefined("0 to an irrational power")
        size = abs(self.num(b))
        if size * (abs(self.magnitude(a)) + 2) > MAX_LOG2:
            raise Undefined("too large")
        self.spend(6)
        return self.noted(self.ctx.power(self.num(a), self.num(b)), a, b)

    def noted(self, result, *arguments):
        """`result`, noting whether a function of real numbers left the reals (outside its usual domain)."""
        if isinstance(result, self.ctx.mpc) and not any(isinstance(a, self.ctx.mpc) for a in arguments):
            self.left_reals = True
        return result

    def op_sqrt(self, a):
        return self.op_pow(a, Fraction(1, 2))

    def op_cbrt(self, a):
        return self.op_root(a, Fraction(3))

    def op_root(self, a, n):
        if n == 0:
            raise Undefined("a zeroth root")
        real = isinstance(a, Fraction) or isinstance(a, self.ctx.mpf)
        if isinstance(n, Fraction) and n.denominator == 1 and n.numerator % 2 and real and a < 0:
            return -self.op_pow(-a, 1 / n)                       # the real root of odd index
        return self.op_pow(a, self.op_div(Fraction(1), n))

    def op_factorial(self, n):
        if isinstance(n, Fraction) and n.denominator == 1:
            if n < 0:
                raise Undefined("factorial of a negative integer")
            if n <= 4000:
                self.spend(1 + int(n) // 20)
                return Fraction(math.factorial(int(n)))
        return self.gamma(self.num(n) + 1)

    def op_factorial2(self, n):
        if not isinstance(n, Fraction) or n.denominator != 1 or not 0 <= n <= 1000:
            raise Undefined("double factorial")
        self.spend(1 + int(n) // 20)
        return Fraction(math.prod(range(int(n), 0, -2)))

    def gamma(self, x):
        if isinstance(x, self.ctx.mpc) or abs(x) > 50_000:
            raise Undefined("too large")
        if x <= 0 and x == self.ctx.floor(x):
            raise Undefined("a pole")
        self.spend(60)
        return self.ctx.gamma(x)

    def op_binom(self, n, k):
        if all(isinstance(v, Fraction) and v.denominator == 1 and abs(v) <= 5000 for v in (n, k)) and n >= 0:
            self.spend(1 + int(n) // 20)
            return Fraction(math.comb(int(n), int(k)) if k >= 0 else 0)
        return self.gamma(self.num(n) + 1) / (self.gamma(self.num(k) + 1) * self.gamma(self.num(n) - self.num(k) + 1))

    def op_abs(self, a):
        return abs(a)

    def real(self, a):
        if isinstance(a, self.ctx.mpc):
            raise Undefined("not real")
        return a

    def nearest(self, a) -> int | None:
        """The integer that `a` is but for rounding."""
        near = self.ctx.nint(a)
        return int(near) if abs(a - near) < self.ctx.mpf(10) ** -NOISE else None

    def op_floor(self, a):
        if isinstance(self.real(a), Fraction):
            return Fraction(math.floor(a))
        if self.magnitude(a) > 150:
            raise Undefined("too large for a floor")
        near = self.nearest(a)
        return Fraction(int(self.ctx.floor(a)) if near is None else near)

    def op_ceil(self, a):
        return -self.op_floor(-a)

    def op_mod(self, a, b):
        if b == 0:
            raise Undefined("modulo zero")
        if not isinstance(a, Fraction) or not isinstance(b, Fraction):
            raise Undefined("a remainder of irrational numbers")
        return a - b * self.op_floor(self.op_div(a, b))

    def whole_numbers(self, values) -> list[int]:
        if not all(isinstance(v, Fraction) and v.denominator == 1 for v in values):
            raise Undefined("not whole numbers")
        return [int(v) for v in values]

    def op_gcd(self, *values):
        return Fraction(math.gcd(*self.whole_numbers(values)))

    def op_lcm(self, *values):
        return Fraction(math.lcm(*self.whole_numbers(values)))

    def op_min(self, *values):
        return min(map(self.real, values), key=self.num)

    def op_max(self, *values):
        return max(map(self.real, values), key=self.num)

    def op_sgn(self, a):
        return Fraction((self.real(a) > 0) - (a < 0))

    def op_logbase(self, a, base):
        bottom = self.op_ln(base)
        if bottom == 0:
            raise Undefined("logarithm to base 1")
        return self.op_div(self.op_ln(a), bottom)

    def op_ln(self, a):
        if a == 0:
            raise Undefined("log 0")
        if a == 1:
            return Fraction(0)
        self.spend(3)
        return self.noted(self.ctx.log(self.num(a)), a)

    op_log = op_ln

    def op_exp(self, a):
        return self.op_pow(+self.ctx.e, a)

    def function(self, name: str, *values):
        """Trigonometric and hyperbolic functions and their inverses."""
        if len(values) != 1 or name not in TRIG:
            raise Undefined(f"{name} has no value")
        a = values[0]
        if self.magnitude(a) > (20 if name in ("sinh", "cosh") else 200):
            raise Undefined("too large")
        self.spend(6)
        result = getattr(self.ctx, TRIG[name])(self.num(a))
        if self.magnitude(result) > 150:
            raise Undefined("a pole")
        return result

    # -- what has no arithmetic of its own

    def random_value(self, *key: str) -> Fraction:
        digest = hashlib.blake2b("\x00".join(key).encode(), digest_size=8).digest()
        return Fraction(1, 2) + Fraction(int.from_bytes(digest[:5], "big"), 2 ** 39)

    def key(self, node) -> str:
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
        if isinstance(value, Fraction) and value.denominator == 1 and abs(value) < 10 ** 15:
            return str(value.numerator)
        return self.ctx.nstr(self.num(value), 20).removesuffix(".0")

    def opaque(self, node: Op):
        """A call or a subscripted symbol: a random function of the values of its arguments."""
        name, *args = node.args
        if node.head == "call" and len(args) == 1 and isinstance(name, Sym) and isinstance(args[0], Sym) and not (
                name.name[:1] in CALLED or "'" in name.name):
            return self.op_mul(self.value(name), self.value(args[0]))      # u(t): alike as a call or as a product
        title = name if isinstance(name, str) else name.name if isinstance(name, Sym) else self.key(name)
        return self.random_value(node.head, title, *(self.key(arg) for arg in args))

    def big(self, head: str, low: Node, high: Node, body: Node):
        """Sums and products of few terms are written out; the others, integrals and limits are opaque."""
        if isinstance(low, Rel) and low.ops == ["="] and isinstance(low.terms[0], Sym | Op):
            variable = low.terms[0].name if isinstance(low.terms[0], Sym) else low.terms[0].head
            if head in ("sum", "prod") and not (isinstance(high, Op) and high.head == "inf"):
                total = self.written_out(head, variable, self.value(low.terms[1]), self.value(high), body)
                if total is not None:
                    return total
            return self.random_value(head, self.key(low.terms[1]), self.key(high), self.key(body))
        return self.random_value(head, self.key(low), self.key(high), self.key(body))

    def written_out(self, head: str, variable: str, start, stop, body: Node):
        if not all(isinstance(v, Fraction) and v.denominator == 1 for v in (start, stop)):
            return None
        if stop - start >= MAX_TERMS:
            return None
        total = Fraction(head == "prod")
        saved = self.env.get(variable)
        for k in range(int(start), int(stop) + 1):
            self.env[variable] = Fraction(k)
            term = self.value(body)
            total = self.checked(self.op_add(total, term) if head == "sum" else self.op_mul(total, term))
        if saved is None:
            self.env.pop(variable, None)
        else:
            self.env[variable] = saved
        return total

    def determinant(self, matrix: Matrix):
        rows = matrix.rows if isinstance(matrix, Matrix) else []
        if not rows or len(rows) != len(rows[0]) or len(rows) > 5:
            raise Undefined("no determinant")
        values = [[self.value(cell) for cell in row] for row in rows]
        return self.checked(self.minor(values))

    def minor(self, rows: list[list]):
        if len(rows) == 1:
            return rows[0][0]
        total = Fraction(0)
        for at, cell in enumerate(rows[0]):
            part = self.op_mul(cell, self.minor([row[:at] + row[at + 1:] for row in rows[1:]]))
            total = self.op_add(total, -part if at % 2 else part)
        return total


NAMES = {"+": "add", "*": "mul", "/": "div", "^": "pow"}
TRIG = {name: name for name in "sin cos tan cot sec csc sinh cosh tanh coth sech csch".split()} | {
    "arc" + name: "a" + name for name in "sin cos tan cot sec csc sinh cosh tanh".split()}


def exact_root(a: Fraction, n: int) -> Fraction | None:
    """The positive rational n-th root of a positive rational, if there is one."""
    if a.numerator.bit_length() > 4096 or a.denominator.bit_length() > 4096:
        return None
    top, bottom = _integer_root(a.numerator, n), _integer_root(a.denominator, n)
    return Fraction(top, bottom) if top ** n == a.numerator and bottom ** n == a.denominator else None


def _integer_root(a: int, n: int) -> int:
    """The floor of the n-th root, by Newton's iteration on integers."""
    if n == 2:
        return math.isqrt(a)
    x = 1 << -(-a.bit_length() // n)
    while True:
        y = ((n - 1) * x + a // x ** (n - 1)) // n
        if y >= x:
            return x
        x = y


def close(at: Evaluator, x, y, a: Node | None = None, b: Node | None = None) -> bool:
    """Whether two values are the same number, of any size: relative difference below 10^-NOISE.

    Where both nearly vanish, rounding could hide a difference or a zero: their trees `a` and `b` are evaluated again
    with more than twice the digits, and a value that shrinks with the precision is zero.
    """
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    tiny = -3 * NOISE                                            # in bits, above 10^-NOISE
    if a is not None and all(v == 0 or at.magnitude(v) < tiny for v in (x, y)):
        at = Evaluator(at.index, at.whole, at.budget, 2 * DIGITS + 20, dict(at.env))
        x, y = at.value(a), at.value(b)
        zero = [v == 0 or not isinstance(v, Fraction) and at.magnitude(v) < -8 * NOISE for v in (x, y)]
        if any(zero):
            return all(zero)
    x, y = at.num(x), at.num(y)
    return abs(x - y) <= max(abs(x), abs(y)) * at.ctx.mpf(10) ** -NOISE
