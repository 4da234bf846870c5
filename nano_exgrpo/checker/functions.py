r"""What the checker knows about operations, functions and commands: one table, one row each.

A row says how it is written, how the parser reads it, how many arguments it has, what its value is and what sympy
calls it. A new function is a new row, for example `Function("erf", 1, "prefix", real("erf"), "erf")`.

A value is an exact `Fraction` as long as the arithmetic stays rational, else a real or complex number of mpmath,
sympy's own arithmetic. Each operation looks at the size of its arguments before it starts and states its cost. One
that is too large raises `Undefined`, so no input can start anything long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nano_exgrpo.checker.evaluator import Evaluator

DIGITS = 60  # working precision in decimal digits
NOISE = 40  # a value below 10^-NOISE is looked at again with twice the digits
MAX_BITS = 20_000  # of exact integers
MAX_LOG2 = 2_000_000  # of the magnitude of inexact numbers
ANY = -1  # number of arguments

Value = Any  # a Fraction, or an mpf or mpc of mpmath


class Undefined(ArithmeticError):
    """The expression has no value at this point, or none that the bounds allow to compute."""


@dataclass(frozen=True, slots=True)
class Function:
    """One operation, function or command.

    Attributes:
        name: the head of its node in a tree.
        arity: the number of its arguments, or `ANY`.
        reading: the rule that reads it (see `parser.READINGS`); "" if other rules make its node.
        value: its value from an evaluator and the values of its arguments; None if it has none of its own.
        sympy: its name in sympy; "" if `sympy_form` builds it otherwise or not at all.
        spellings: other names for it, with or without a backslash.
    """

    name: str
    arity: int = ANY
    reading: str = ""
    value: Callable[..., Value] | None = None
    sympy: str = ""
    spellings: str = ""


# ------------------------------------------------------------------------------------------------------- arithmetic


def add(at: Evaluator, *values: Value) -> Value:
    if all(isinstance(value, Fraction) for value in values):
        total = values[0]
        for value in values[1:]:
            at.spend_bits(total, value)
            total = at.checked(total + value)
        return total
    return sum(map(at.num, values[1:]), at.num(values[0]))


def multiply(at: Evaluator, *values: Value) -> Value:
    product = values[0]
    for value in values[1:]:
        if isinstance(product, Fraction) and isinstance(value, Fraction):
            at.spend_bits(product, value)
            product = at.checked(product * value)
        else:
            product = at.num(product) * at.num(value)
    return product


def divide(at: Evaluator, a: Value, b: Value) -> Value:
    if b == 0:
        raise Undefined("division by zero")
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        at.spend_bits(a, b)
        return a / b
    return at.num(a) / at.num(b)


def power(at: Evaluator, a: Value, b: Value) -> Value:
    if a == 0 and (not isinstance(b, Fraction) or b <= 0):
        raise Undefined("0 to a power that is not positive")
    if a == 0:
        return Fraction(0)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if b.denominator == 1:
            size = abs(b.numerator) * (a.numerator.bit_length() + a.denominator.bit_length())
            if abs(a) == 1 or size <= MAX_BITS:
                at.spend(1 + (size >> 10))
                return a ** (b.numerator % 2 if abs(a) == 1 else b.numerator)
        elif a > 0 and b.denominator <= 64 and (root := exact_root(a, b.denominator)) is not None:
            return power(at, root, Fraction(b.numerator))
    if abs(at.num(b)) * (abs(at.magnitude(a)) + 2) > MAX_LOG2:
        raise Undefined("too large")
    at.spend(6)
    return at.noted(at.ctx.power(at.num(a), at.num(b)), a, b)


def exact_root(a: Fraction, n: int) -> Fraction | None:
    """The positive rational n-th root of a positive rational, if there is one."""
    if a.numerator.bit_length() > 4096 or a.denominator.bit_length() > 4096:
        return None
    top, bottom = integer_root(a.numerator, n), integer_root(a.denominator, n)
    return Fraction(top, bottom) if top**n == a.numerator and bottom**n == a.denominator else None


def integer_root(a: int, n: int) -> int:
    """The floor of the n-th root, by Newton's iteration on integers."""
    if n == 2:
        return math.isqrt(a)
    x = 1 << -(-a.bit_length() // n)
    while True:
        y = ((n - 1) * x + a // x ** (n - 1)) // n
        if y >= x:
            return x
        x = y


def root(at: Evaluator, a: Value, n: Value) -> Value:
    if n == 0:
        raise Undefined("a zeroth root")
    if is_whole(n) and n.numerator % 2 and isinstance(a, Fraction | at.ctx.mpf) and a < 0:
        return -power(at, -a, 1 / n)  # the real root of odd index
    return power(at, a, divide(at, Fraction(1), n))


def logarithm(at: Evaluator, a: Value, base: Value | None = None) -> Value:
    if base is not None:
        bottom = logarithm(at, base)
        if bottom == 0:
            raise Undefined("logarithm to base 1")
        return divide(at, logarithm(at, a), bottom)
    if a == 0:
        raise Undefined("log 0")
    if a == 1:
        return Fraction(0)
    at.spend(3)
    return at.noted(at.ctx.log(at.num(a)), a)


# ---------------------------------------------------------------------------------------------------- whole numbers


def is_whole(value: Value) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def factorial(at: Evaluator, n: Value) -> Value:
    if is_whole(n) and n < 0:
        raise Undefined("factorial of a negative integer")
    if is_whole(n) and n <= 4000:
        at.spend(1 + int(n) // 20)
        return Fraction(math.factorial(int(n)))
    return gamma(at, at.num(n) + 1)


def double_factorial(at: Evaluator, n: Value) -> Value:
    if not is_whole(n) or not 0 <= n <= 1000:
        raise Undefined("double factorial")
    at.spend(1 + int(n) // 20)
    return Fraction(math.prod(range(int(n), 0, -2)))


def gamma(at: Evaluator, x: Value) -> Value:
    if isinstance(x, at.ctx.mpc) or abs(x) > 50_000 or at.digits > 3 * DIGITS:  # where it takes seconds
        raise Undefined("too large")
    if x <= 0 and x == at.ctx.floor(x):
        raise Undefined("a pole")
    at.spend(60)
    return at.ctx.gamma(x)


def zeta(at: Evaluator, s: Value) -> Value:
    if not isinstance(s, Fraction) or not 1 < s <= 100:
        raise Undefined("the zeta function outside (1, 100]")
    at.spend(60)
    return at.ctx.zeta(at.num(s))


def binomial(at: Evaluator, n: Value, k: Value) -> Value:
    if all(is_whole(v) and abs(v) <= 5000 for v in (n, k)) and n >= 0:
        at.spend(1 + int(n) // 20)
        return Fraction(math.comb(int(n), int(k)) if k >= 0 else 0)
    n, k = at.num(n), at.num(k)
    return gamma(at, n + 1) / (gamma(at, k + 1) * gamma(at, n - k + 1))


def floor(at: Evaluator, a: Value) -> Value:
    if isinstance(at.real(a), Fraction):
        return Fraction(math.floor(a))
    if at.magnitude(a) > 150:
        raise Undefined("too large for a floor")
    near = at.ctx.nint(a)
    is_near = abs(a - near) < at.ctx.mpf(10) ** -NOISE  # an integer but for rounding
    return Fraction(int(near if is_near else at.ctx.floor(a)))


def modulo(at: Evaluator, a: Value, b: Value) -> Value:
    if b == 0 or not isinstance(a, Fraction) or not isinstance(b, Fraction):
        raise Undefined("a remainder of irrational numbers, or modulo zero")
    return a - b * floor(at, divide(at, a, b))


def of_whole_numbers(function: Callable[..., int]) -> Callable[..., Value]:
    """The value of a function that is defined for whole numbers only."""

    def value(at: Evaluator, *values: Value) -> Value:
        if not all(map(is_whole, values)):
            raise Undefined("not whole numbers")
        return Fraction(function(*map(int, values)))

    return value


# ---------------------------------------------------------------------------------------------------- real functions


def real(name: str, largest: int = 200) -> Callable[..., Value]:
    """The value of mpmath's function `name` of one argument of at most 2^`largest`."""

    def value(at: Evaluator, a: Value) -> Value:
        if at.magnitude(a) > largest:
            raise Undefined("too large")
        at.spend(6)
        result = getattr(at.ctx, name)(at.num(a))
        if at.magnitude(result) > 150:
            raise Undefined("a pole")
        return result

    return value


def radians(at: Evaluator, a: Value) -> Value:
    at.spend(2)
    return at.num(a) * at.ctx.pi / 180


# --------------------------------------------------------------------------------------------------------- the table

_ROWS = [
    # operations
    Function("+", ANY, "", add),
    Function("*", ANY, "", multiply),
    Function("/", 2, "", divide),
    Function("^", 2, "", power),
    Function("neg", 1, "", lambda at, a: -a),
    Function("mixed", 2, "", lambda at, whole, part: whole + part),
    Function("percent", 1, "", lambda at, a: divide(at, a, Fraction(100))),
    Function("degree", 1, "", lambda at, a: a),
    Function("radians", 1, "", radians),
    Function("factorial2", 1, "", double_factorial, "factorial2"),
    Function("root", 2, "", root),
    Function("logbase", 2, "", logarithm),
    Function("conj", 1, "", lambda at, a: a if isinstance(a, Fraction) else at.ctx.conj(a), "conjugate"),
    Function("\\Gamma", 1, "", lambda at, a: factorial(at, a - 1)),
    Function("\\zeta", 1, "", zeta),
    Function("approximate", 1, "", lambda at, a: at.num(a)),
    # constants
    Function("pi", 0, "constant", lambda at: +at.ctx.pi, "pi", "varpi"),
    Function("e", 0, "", lambda at: +at.ctx.e, "E"),
    Function("i", 0, "", lambda at: at.env.get("i", at.ctx.mpc(0, 1)), "I"),  # a bound variable if a sum says so
    Function("inf", 0, "constant", None, "oo", "infty infinity oo"),
    Function("emptyset", 0, "emptyset", spellings="varnothing"),
    Function("reals", 0, "reals", spellings="R Reals real"),
    # trigonometry
    Function("sin", 1, "prefix", real("sin"), "sin"),
    Function("cos", 1, "prefix", real("cos"), "cos"),
    Function("tan", 1, "prefix", real("tan"), "tan", "tg"),
    Function("cot", 1, "prefix", real("cot"), "cot", "ctg"),
    Function("sec", 1, "prefix", real("sec"), "sec"),
    Function("csc", 1, "prefix", real("csc"), "csc", "cosec"),
    Function("arcsin", 1, "prefix", real("asin"), "asin", "asin"),
    Function("arccos", 1, "prefix", real("acos"), "acos", "acos"),
    Function("arctan", 1, "prefix", real("atan"), "atan", "arctg atan"),
    Function("arccot", 1, "prefix", real("acot"), "acot"),
    Function("arcsec", 1, "prefix", real("asec"), "asec"),
    Function("arccsc", 1, "prefix", real("acsc"), "acsc"),
    Function("sinh", 1, "prefix", real("sinh", 20), "sinh"),
    Function("cosh", 1, "prefix", real("cosh", 20), "cosh"),
    Function("tanh", 1, "prefix", real("tanh"), "tanh"),
    Function("coth", 1, "prefix", real("coth"), "coth"),
    Function("sech", 1, "prefix", real("sech"), "sech"),
    Function("csch", 1, "prefix", real("csch"), "csch"),
    Function("arcsinh", 1, "prefix", real("asinh"), "asinh", "asinh arsinh"),
    Function("arccosh", 1, "prefix", real("acosh"), "acosh", "acosh arcosh"),
    Function("arctanh", 1, "prefix", real("atanh"), "atanh", "atanh artanh"),
    Function("cis", 1, "prefix"),
    # other functions
    Function("ln", 1, "prefix", logarithm, "log"),
    Function("log", 1, "prefix", logarithm, "log"),
    Function("lg", 1, "prefix"),
    Function("exp", 1, "prefix", lambda at, a: power(at, +at.ctx.e, a), "exp"),
    Function("sqrt", 1, "root", lambda at, a: power(at, a, Fraction(1, 2))),
    Function("cbrt", 1, "prefix", lambda at, a: root(at, a, Fraction(3))),
    Function("abs", 1, "prefix", lambda at, a: abs(a), "Abs", "Abs"),
    Function("norm", 1, "", lambda at, a: abs(a), "Abs"),
    Function("sgn", 1, "prefix", lambda at, a: Fraction((at.real(a) > 0) - (a < 0)), "sign", "sign"),
    Function("arg", 1, "prefix", None, "arg"),
    Function("floor", 1, "prefix", floor, "floor"),
    Function("ceil", 1, "prefix", lambda at, a: -floor(at, -a), "ceiling", "ceiling"),
    Function("factorial", 1, "prefix", factorial, "factorial"),
    Function("det", 1, "prefix"),
    Function("min", ANY, "several", lambda at, *values: min(map(at.real, values), key=at.num), "Min"),
    Function("max", ANY, "several", lambda at, *values: max(map(at.real, values), key=at.num), "Max"),
    Function("gcd", ANY, "several", of_whole_numbers(math.gcd), "gcd"),
    Function("lcm", ANY, "several", of_whole_numbers(math.lcm), "lcm"),
    Function("binom", 2, "binomial", binomial, "binomial", "dbinom tbinom"),
    Function("mod", 2, "infix", modulo, "Mod"),
    # commands
    Function("pmod", 1, "infix"),
    Function("bmod", 2, "infix"),
    Function("choose", 2, "infix"),
    Function("over", 2, "infix"),
    Function("frac", 2, "fraction", spellings="dfrac tfrac cfrac nicefrac sfrac"),
    Function("overline", 1, "accent", spellings="overbar bar"),
    Function("hat", 1, "accent", spellings="widehat"),
    Function("dot", 1, "accent"),
    Function("ddot", 1, "accent"),
    Function("tilde", 1, "accent", spellings="widetilde"),
    Function("overrightarrow", 1, "vector", spellings="vec"),
    Function("angle", 1, "angle", spellings="measuredangle"),
    Function("sum", 3, "big"),
    Function("prod", 3, "big"),
    Function("int", 3, "big", spellings="iint oint"),
    Function("lim", 3, "big", spellings="limit"),
]
FUNCTIONS = {row.name: row for row in _ROWS}
CALLED = {row.name for row in _ROWS if row.reading in ("prefix", "root", "several", "binomial")}  # written before "("
SPELLINGS = {spelling: row.name for row in _ROWS for spelling in row.spellings.split()}
