"""Stage 3 of the answer checker, second half: the number that a tree stands for.

`Evaluator.value(node)` walks a tree with the operations of `arithmetic`. Symbols take rational values from a point.
What has no known value (an unknown function `f(3)`, a subscripted family `a_{n-1}`, an integral) takes a
pseudo-random value that depends on its name and on the values of its arguments only: two expressions that agree at
random points for random functions are equal as expressions (Schwartz-Zippel).
"""

from __future__ import annotations

import hashlib
import random
from fractions import Fraction
from functools import lru_cache

from nano_exgrpo.checker.arithmetic import DIGITS, NOISE, Arithmetic, Undefined
from nano_exgrpo.checker.expressions import CALLED
from nano_exgrpo.checker.tree import Matrix, Node, Num, Op, Rel, Seq, Sym

MAX_TERMS = 1_000  # of a sum or product that is written out
NAMES = {"+": "add", "*": "mul", "/": "div", "^": "pow"}


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


class Evaluator(Arithmetic):
    """Values of trees at one point.

    Args:
        index: which random point; a symbol's value depends on its name and on this.
        whole: take whole numbers (floors, factorials and sums mean little elsewhere).
        budget, digits: see `Arithmetic`.
        env: values of symbols that are set, not random.
    """

    def __init__(self, index: int, whole: bool, budget: list[int], digits: int = DIGITS, env: dict | None = None):
        super().__init__(budget, digits)
        self.index, self.whole = index, whole
        self.env: dict[str, Fraction] = env or {}

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
            raise Undefined(f"{head}: {error}") from None  # too few arguments, complex order, a pole

    def value_and_real(self, node: Node):
        """The value of a tree, and whether all of it stays real, roots and logarithms included."""
        self.left_reals = False
        value = self.value(node)
        return value, not self.left_reals and not isinstance(value, self.ctx.mpc)

    def op_i(self):
        return self.env["i"] if "i" in self.env else self.ctx.mpc(0, 1)  # a bound variable if a sum says so

    # -- what has no arithmetic of its own

    def random_value(self, *key: str) -> Fraction:
        """As of a symbol whose name is the key: another one at every point, or x_1 = 3 would be a multiple of x_1 = 4."""
        return sample(hashlib.blake2b("\x00".join(key).encode(), digest_size=8).hexdigest(), self.index, False)

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
        if isinstance(value, Fraction) and value.denominator == 1 and abs(value) < 10**15:
            return str(value.numerator)
        return self.ctx.nstr(self.num(value), 20).removesuffix(".0")

    def opaque(self, node: Op):
        """A call or a subscripted symbol: a random function of the values of its arguments."""
        name, *args = node.args
        if (
            node.head == "call"
            and len(args) == 1
            and isinstance(name, Sym)
            and isinstance(args[0], Sym)
            and not (name.name[:1] in CALLED or "'" in name.name)
        ):
            return self.op_mul(self.value(name), self.value(args[0]))  # u(t): alike as a call or as a product
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
            part = self.op_mul(cell, self.minor([row[:at] + row[at + 1 :] for row in rows[1:]]))
            total = self.op_add(total, -part if at % 2 else part)
        return total


def close(at: Evaluator, x, y, a: Node | None = None, b: Node | None = None) -> bool:
    """Whether two values are the same number, of any size: relative difference below 10^-NOISE.

    Where both nearly vanish, rounding could hide a difference or a zero: their trees `a` and `b` are evaluated again
    with more than twice the digits, and a value that shrinks with the precision is zero.
    """
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    tiny = -3 * NOISE  # in bits, above 10^-NOISE
    if a is not None and all(v == 0 or at.magnitude(v) < tiny for v in (x, y)):
        at = Evaluator(at.index, at.whole, at.budget, 2 * DIGITS + 20, dict(at.env))
        x, y = at.value(a), at.value(b)
        zero = [v == 0 or not isinstance(v, Fraction) and at.magnitude(v) < -8 * NOISE for v in (x, y)]
        if any(zero):
            return all(zero)
    x, y = at.num(x), at.num(y)
    return abs(x - y) <= max(abs(x), abs(y)) * at.ctx.mpf(10) ** -NOISE
