"""Stage 3 of the answer checker, first half: arithmetic within bounds.

Numbers are exact `Fraction`s wherever the arithmetic stays rational, else real or complex numbers of `DIGITS`
digits (mpmath, sympy's own arithmetic). Every power, factorial, binomial and function states its cost before it is
computed, from the magnitudes of its arguments; one too large, or one operation too many, raises `Undefined`. No
input can start anything long. Nothing here is shared between threads: each has its own arithmetic context.
"""

from __future__ import annotations

import math
import threading
from fractions import Fraction

DIGITS = 60  # working precision in decimal digits
MAX_BITS = 20_000  # of exact integers
MAX_LOG2 = 2_000_000  # of the magnitude of inexact numbers
NOISE = 40  # a value below 10^-NOISE is looked at again with twice the digits

_local = threading.local()


class Undefined(ArithmeticError):
    """The expression has no value at this point, or none that the bounds allow to compute."""


def context(digits: int = DIGITS):
    """This thread's mpmath context of the given precision."""
    contexts = _local.__dict__.setdefault("contexts", {})
    if digits not in contexts:
        from mpmath import MPContext  # a part of every sympy installation

        contexts[digits] = MPContext()
        contexts[digits].dps = digits
    return contexts[digits]


class Arithmetic:
    """One method `op_...` for each operation of a tree (see `tree.Op`).

    Args:
        budget: a one-element list of work units left, shared by all evaluations of a verdict.
        digits: the precision of inexact numbers.
    """

    def __init__(self, budget: list[int], digits: int = DIGITS):
        self.budget, self.digits = budget, digits
        self.left_reals = False  # whether a function left the real numbers
        self.smallest = self.largest = 0  # binary magnitudes of the inexact numbers met
        self.ctx = context(digits)

    # -- numbers

    def num(self, value):
        """`value` as a number of the context."""
        if isinstance(value, Fraction):
            if value:
                self.measure(self.magnitude(value))
            return self.ctx.mpf(value.numerator) / value.denominator
        return value

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
        magnitude = self.magnitude(value)
        if abs(magnitude) > MAX_LOG2:
            raise Undefined("too large")
        if value != 0:
            self.measure(magnitude)
        return value

    # -- operations

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
            return -self.op_pow(-a, 1 / n)  # the real root of odd index
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
        if isinstance(x, self.ctx.mpc) or abs(x) > 50_000 or self.digits > 3 * DIGITS:  # where it takes seconds
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

    def op_conj(self, a):
        return a if isinstance(a, Fraction) else self.ctx.conj(a)

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


TRIG = {name: name for name in "sin cos tan cot sec csc sinh cosh tanh coth sech csch".split()} | {
    "arc" + name: "a" + name for name in "sin cos tan cot sec csc sinh cosh tanh".split()
}


def exact_root(a: Fraction, n: int) -> Fraction | None:
    """The positive rational n-th root of a positive rational, if there is one."""
    if a.numerator.bit_length() > 4096 or a.denominator.bit_length() > 4096:
        return None
    top, bottom = _integer_root(a.numerator, n), _integer_root(a.denominator, n)
    return Fraction(top, bottom) if top**n == a.numerator and bottom**n == a.denominator else None


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
