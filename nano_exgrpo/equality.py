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
from functools import cmp_to_key

from nano_exgrpo.latex import Based, Matrix, Node, Num, Op, Quantity, Ratio, Rel, Seq, Sym
from nano_exgrpo.units import SINGLE_LETTERS
from nano_exgrpo.values import DIGITS, NOISE, Evaluator, Undefined, context, names_of

BUDGET = 8_000              # work units of one verdict, some 5 microseconds each
POINTS = 7                  # random points for expressions with symbols
WHOLE_POINTS = 41           # whole numbers for expressions with floors: all from 1 to 41
MAX_ITEMS = 64              # of a list or set
LITERAL_DIGITS = 12         # a decimal literal of so many right digits stands for the exact value
WHOLE_HEADS = {"@floor", "@ceil", "@factorial", "@factorial2", "@binom", "@sum", "@prod", "@mod", "@gcd", "@lcm"}
INEQUALITIES = {"<", ">", "<=", ">=", "!="}
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


class Judge:
    """One verdict: `why` says, for people, what decided it."""

    def __init__(self, gold: Node, answer: Node):
        self.gold, self.answer = gold, answer
        self.budget = [BUDGET]
        self.why = ""

    def verdict(self) -> bool:
        try:
            return self.equal(self.gold, self.answer)
        except Undefined as error:
            return self.no(f"no value: {error}")

    def no(self, why: str) -> bool:
        self.why = self.why or why
        return False

    # -- dispatch by kind

    def equal(self, a: Node, b: Node) -> bool:
        """Whether `b` states the answer `a`."""
        a, b = self.unwrapped(a), self.unwrapped(b)
        if isinstance(a, Quantity) or isinstance(b, Quantity):
            return self.quantities(a, b)
        heads = names_of(a), names_of(b)
        if any(h & {"@pm", "@mp"} for h in heads):
            a, b = self.spread(a), self.spread(b)
        if isinstance(a, Rel) and isinstance(b, Rel) and self.both_relations(a, b):
            return True
        if self.is_real_set(a) or self.is_real_set(b):
            sets = self.real_set(a), self.real_set(b)
            if None not in sets:
                return self.sets_equal(*sets) or self.no("they are different sets of real numbers")
        if isinstance(a, Rel) or isinstance(b, Rel):
            return self.relations(a, b)
        if isinstance(a, Seq) or isinstance(b, Seq) or self.has_matrix(a) or self.has_matrix(b):
            return self.containers(a, b)
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            return isinstance(a, Ratio) and isinstance(b, Ratio) and self.ratios(a, b) or self.no("different ratios or times")
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
        if unit_a and unit_b and unit_a.dims and unit_b.dims:
            if unit_a.dims != unit_b.dims:
                known = [dict(u.dims) for u in (unit_a, unit_b)]
                if not set(" ".join(known[0]).split()) <= set(" ".join(known[1]).split()) or known[0].keys() & known[1].keys():
                    return self.no("the units conflict")
            elif unit_a.factor != unit_b.factor and not isinstance(a, Ratio):
                b = Op("*", (b, Num(unit_b.factor / unit_a.factor)))
        return self.equal(a, b)

    # -- plus-minus: one value for each choice of signs

    def spread(self, node: Node) -> Node:
        """`a pm b` as the list of its values. Signs are chosen independently, together where "mp" occurs."""
        if isinstance(node, Seq) and node.kind != "tuple":
            items = [self.spread(item) for item in node.items]
            return Seq(node.kind, [i for item in items for i in (item.items if isinstance(item, Seq) and item.kind == "list" else [item])])
        heads = names_of(node)
        if not heads & {"@pm", "@mp"}:
            return node
        if isinstance(node, Op) and node.head in ("cup", "cap", "setminus"):
            return Op(node.head, tuple(map(self.spread, node.args)))
        if isinstance(node, Rel) and len(node.terms) == 2 and node.ops == ["="]:
            values = self.spread(node.terms[1])
            if isinstance(values, Seq):
                return Seq("list", [Rel([node.terms[0], value], ["="]) for value in values.items])
        if "@mp" in heads:
            return Seq("list", [choose(node, [sign], together=True) for sign in (1, -1)])
        count = count_heads(node, "pm")
        if count > 4:
            raise Undefined("too many plus-minus signs")
        variants = []
        for bits in range(2 ** count):
            variants.append(choose(node, [1 - 2 * (bits >> k & 1) for k in range(count)], together=False))
        return Seq("list", variants)

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
        if set(a.ops) == set(b.ops) == {"="} and (len(a.terms) > 2 or len(b.terms) > 2 or is_label(a.terms[0]) or is_label(b.terms[0])):
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
        return self.no("the relations are not multiples of each other")

    def is_equation(self, rel: Rel) -> bool:
        """Whether an equality says something: `0 = 0` and `y = y` do not."""
        return not any(self.equal(x, y) for x, y in zip(rel.terms, rel.terms[1:]))

    def proportion(self, a: Rel, b: Rel):
        """The constant c != 0 with (left - right of a) = c (left - right of b), or None."""
        sides = [Op("+", (r.terms[0], Op("neg", (r.terms[1],)))) for r in (a, b)]
        if not all(isinstance(t, Num | Sym | Op) for r in (a, b) for t in r.terms):
            return None
        names = names_of(sides[0]) | names_of(sides[1])
        if not {n for n in names if n[0] != "@"} and "@call" not in names and "@sub" not in names:
            return None
        ratios = []
        for index in range(POINTS):
            at = Evaluator(index, bool(names & WHOLE_HEADS), self.budget)
            try:
                top, bottom = at.value(sides[0]), at.value(sides[1])
                if top == 0 or bottom == 0 or at.magnitude(top) < -3 * NOISE or at.magnitude(bottom) < -3 * NOISE:
                    return None
                ratios.append(at.op_div(top, bottom))
            except Undefined:
                continue
        if len(ratios) < 3 or not all(self.close(at, r, ratios[0]) for r in ratios):
            return None
        ratio = at.num(ratios[0])
        return None if isinstance(ratio, at.ctx.mpc) else ratio

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
        return any(all(self.equal(y, x) if flip else self.equal(x, y) for x, y in zip(entries.items, order)) for order in orders)

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
                return self.no("a value of the gold answer is missing")
            del right[match]
        return True

    def distinct(self, items: list) -> list:
        out: list = []
        for item in items[:MAX_ITEMS]:
            if not any(self.equal(item, other) for other in out):
                out.append(item)
        return out + items[MAX_ITEMS:]

    def ratios(self, a: Ratio, b: Ratio) -> bool:
        """Equal part by part, or proportional."""
        if len(a.parts) != len(b.parts):
            return False
        if all(self.equal(x, y) for x, y in zip(a.parts, b.parts)):
            return True
        if any(isinstance(p, Op) and p.head == "..." for p in a.parts + b.parts):
            return False
        pairs = [(Op("*", (x, b.parts[0])), Op("*", (y, a.parts[0]))) for x, y in zip(a.parts[1:], b.parts[1:])]
        return all(self.equal(x, y) for x, y in pairs)

    # -- matrices

    def has_matrix(self, node: Node) -> bool:
        return isinstance(node, Matrix) or isinstance(node, Op) and node.head not in ("det", "abs") and any(map(self.has_matrix, node.args))

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
                return [[Op("+", tuple(Op("*", pair) for pair in zip(row, column))) for column in columns] for row in matrices[0]]
        if head == "^" and parts[0] and args[1] in (Sym("T"), Sym("\\top"), Op("top")):
            return [list(column) for column in zip(*parts[0])]
        return None

    # -- sets of real numbers: a piece is (low, closed, high, closed), None standing for an infinity

    def is_real_set(self, node: Node) -> bool:
        """Whether a tree can only be a set of reals (a pair in parentheses may also be a point)."""
        if isinstance(node, Op):
            return node.head in ("cup", "cap", "setminus", "reals")
        if isinstance(node, Rel):
            return bool(set(node.ops) & (INEQUALITIES | {"in"}))
        if isinstance(node, Seq):
            if node.kind == "tuple":
                return len(node.items) == 2 and (node.ends != "()" or any(infinity(item) for item in node.items))
            return len(node.items) > 1 and all(self.is_real_set(item) for item in node.items)
        return False

    def real_set(self, node: Node) -> tuple[str | None, list] | None:
        """(variable, pieces) of an interval, union, inequality, ...; None for anything else."""
        if isinstance(node, Op):
            if node.head == "reals":
                return None, [(None, False, None, False)]
            if node.head == "+" and len(node.args) == 2 and isinstance(node.args[1], Op) and node.args[1].head == "neg":
                node = Op("setminus", (node.args[0], node.args[1].args[0]))      # R - {1}
            if node.head not in ("cup", "cap", "setminus"):
                return None
            parts = [self.real_set(arg) for arg in node.args]
            if None in parts:
                return None
            (variable, left), (_, right) = parts
            if node.head == "cup":
                return variable, self.union(left + right)
            right = right if node.head == "cap" else self.complement(right)
            return variable, self.intersection(left, right)
        if isinstance(node, Rel):
            return self.solution(node)
        if not isinstance(node, Seq):
            return None
        if node.kind == "tuple":
            if len(node.items) != 2 or not all(isinstance(item, Num | Sym | Op) for item in node.items):
                return None
            low, high = node.items
            if infinity(low) > 0 or infinity(high) < 0:
                return None
            return None, [(None if infinity(low) else low, node.ends[0] == "[", None if infinity(high) else high, node.ends[1] == "]")]
        if node.kind == "set":
            return None, self.union([(item, True, item, True) for item in node.items]) if len(node.items) <= MAX_ITEMS else None
        if len(node.items) > MAX_ITEMS:
            return None
        parts = [self.real_set(item) if self.is_real_set(item) or isinstance(item, Rel) else None for item in node.items]
        if None in parts:
            return None
        variable = next((v for v, _ in parts if v), None)
        if node.kind == "list" and all(isinstance(item, Rel) for item in node.items):
            both = parts[0][1]
            for _, pieces in parts[1:]:
                both = self.intersection(both, pieces)
            if both:
                return variable, both
        return variable, self.union([piece for _, pieces in parts for piece in pieces])

    def solution(self, rel: Rel) -> tuple[str | None, list] | None:
        """The solution set of `x > 2`, `0 < x <= 3`, `|x| >= 5`, `2x + 1 < 5`, `x \\ne 1`, `x \\in (0, 1)`, `x = 3`."""
        terms, ops = rel.terms, rel.ops
        if ops == ["in"]:
            found = self.real_set(terms[1])
            return found and (str(terms[0]), found[1])
        if not set(ops) <= INEQUALITIES | {"="}:
            return None
        if len(terms) == 2:
            left, right, op = terms[0], terms[1], ops[0]
            if is_label(right) and not is_label(left) or not names_of_symbols(left):
                left, right, op = right, left, FLIPPED[op]
            if isinstance(left, Op) and left.head == "abs" and names_of_symbols(left):
                inner, minus = left.args[0], Op("neg", (right,))
                if op in ("<", "<="):
                    return self.solution(Rel([minus, inner, right], [op, op]))
                halves = self.solution(Rel([inner, minus], [FLIPPED[op]])), self.solution(Rel([inner, right], [op]))
                if None in halves or op in ("=", "!="):
                    return None
                return halves[0][0], self.union(halves[0][1] + halves[1][1])
            solved = self.isolate(left, right)
            if solved is None:
                return None
            variable, bound, flips = solved
            op = FLIPPED[op] if flips else op
            if infinity(bound):
                bound = None
            return variable, {
                "<": [(None, False, bound, False)], "<=": [(None, False, bound, True)], ">": [(bound, False, None, False)],
                ">=": [(bound, True, None, False)], "=": [(bound, True, bound, True)],
                "!=": [(None, False, bound, False), (bound, False, None, False)]}[op]
        if len(terms) == 3 and "=" not in ops and "!=" not in ops and ops[0][0] == ops[1][0]:
            halves = self.solution(Rel([terms[1], terms[0]], [FLIPPED[ops[0]]])), self.solution(Rel(terms[1:], ops[1:]))
            if None in halves:
                return None
            (variable, [first]), (_, [second]) = halves
            if first[2] is not None or second[0] is not None:
                first, second = second, first
            return variable, [(first[0], first[1], second[2], second[3])]
        return None

    def isolate(self, left: Node, right: Node) -> tuple[str, Node, bool] | None:
        """(x, c, whether the sign of the relation turns) for `left op right` as `x op c`; None if not linear in one symbol."""
        if is_label(left) and not (names_of_symbols(left) & names_of_symbols(right)):
            return str(left), right, False
        names = names_of_symbols(left) | names_of_symbols(right)
        if len(names) != 1 or not isinstance(left, Num | Sym | Op) or not isinstance(right, Num | Sym | Op):
            return None
        name = next(iter(names))
        difference = Op("+", (left, Op("neg", (right,))))
        try:
            zero, one, two, five = (Evaluator(0, False, self.budget, env={name: Fraction(x)}).value(difference) for x in (0, 1, 2, 5))
        except Undefined:
            return None
        slope = one - zero
        if not isinstance(slope, Fraction) or not isinstance(zero, Fraction) or slope == 0 or (
                two - zero != 2 * slope or five - zero != 5 * slope):
            return None
        return str(Sym(name)), Num(-zero / slope), slope < 0

    def order(self, a: Node, b: Node) -> int:
        """-1, 0 or 1 as a < b, a = b, a > b.

        Raises:
            Undefined: one of them is not a real constant.
        """
        if names_of_symbols(a) or names_of_symbols(b):
            if a == b:
                return 0
            raise Undefined("ends of intervals with symbols cannot be ordered")
        at = Evaluator(0, False, self.budget)
        x, y = at.real(at.value(a)), at.real(at.value(b))
        if self.close(at, x, y):
            return 0
        return -1 if at.num(x) < at.num(y) else 1

    def union(self, pieces: list) -> list:
        """Disjoint pieces in order."""
        if len(pieces) > 2 * MAX_ITEMS:
            raise Undefined("too many intervals")
        if len(pieces) < 2:
            return pieces

        def by_low(p, q) -> int:
            if p[0] is None or q[0] is None:
                return (q[0] is None) - (p[0] is None)
            return self.order(p[0], q[0]) or q[1] - p[1]

        out: list = []
        for piece in sorted(pieces, key=cmp_to_key(by_low)):
            if out and self.touches(out[-1], piece):
                low, low_closed, high, high_closed = out[-1]
                if high is not None and (piece[2] is None or self.order(high, piece[2]) < 0):
                    high, high_closed = piece[2], piece[3]
                elif high is not None and self.order(high, piece[2]) == 0:
                    high_closed = high_closed or piece[3]
                out[-1] = (low, low_closed, high, high_closed)
            else:
                out.append(piece)
        return out

    def touches(self, p: tuple, q: tuple) -> bool:
        """Whether q, which starts no earlier than p, continues it without a gap."""
        if p[2] is None or q[0] is None:
            return True
        order = self.order(p[2], q[0])
        return order > 0 or order == 0 and (p[3] or q[1])

    def complement(self, pieces: list) -> list:
        out, low, closed, open_end = [], None, False, True
        for piece in self.union(pieces):
            if piece[0] is not None:
                out.append((low, closed, piece[0], not piece[1]))
            low, closed = piece[2], not piece[3]
            open_end = piece[2] is not None
        return out + [(low, closed, None, False)] if open_end else out

    def intersection(self, left: list, right: list) -> list:
        pieces = self.complement(self.complement(left) + self.complement(right))
        return [p for p in pieces if p[0] is None or p[2] is None or self.order(p[0], p[2]) < 0 or p[1] and p[3]]

    def sets_equal(self, a: tuple, b: tuple) -> bool:
        if a[0] and b[0] and a[0] != b[0]:
            return self.no("the inequalities are about different variables")
        a, b = self.union(a[1]), self.union(b[1])
        return len(a) == len(b) and all(
            p[1] == q[1] and p[3] == q[3] and all(
                x is y is None or x is not None and y is not None and self.scalars(x, y) for x, y in ((p[0], q[0]), (p[2], q[2])))
            for p, q in zip(a, b))

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
        heads = names_of(a), names_of(b)
        for x, y, with_degrees, with_pi in ((a, b, *heads), (b, a, *reversed(heads))):
            if isinstance(x, Op) and x.head == "degree" and "@pi" in with_pi and "@degree" not in with_pi:
                return self.same_value(Op("radians", x.args), y)
        stripped = without_letter_unit(b)
        if stripped is not None and not names_of_symbols(a):
            return self.same_value(a, stripped)
        return self.no("the values differ")

    def percents(self, a: Node, b: Node, percents: list[bool]) -> bool:
        if all(percents):
            return self.scalars(a.args[0], b.args[0])
        number, other = (a.args[0], b) if percents[0] else (b.args[0], a)
        if self.same_value(Op("percent", (number,)), other):
            return True
        at = Evaluator(0, False, self.budget)
        return (not names_of_symbols(number) and abs(at.num(at.value(number))) >= 1 and self.same_value(number, other)) or self.no(
            "p% is p/100")

    def same_value(self, a: Node, b: Node) -> bool:
        """Equality at random points, exact wherever the values are rational."""
        if a == b:
            return True
        names = names_of(a) | names_of(b)
        symbols = {n for n in names if n[0] != "@"}
        if not symbols and not names & {"@call", "@sub", "@int", "@lim"}:
            at = Evaluator(0, False, self.budget)
            try:
                x, y = at.value(a), at.value(b)
            except Undefined as error:
                return self.no(f"no value: {error}")
            return self.close(at, x, y, a, b) or self.literal(at, x, y, a, b)
        whole = bool(names & WHOLE_HEADS) or negative_base(a) or negative_base(b)
        complex_allowed = "@i" in names
        good = complex_good = 0
        complex_bad = False
        stepwise = names & {"@floor", "@ceil", "@mod"} and not names & {"@sum", "@prod"}
        for index in range(WHOLE_POINTS if stepwise else POINTS + 3 if whole else POINTS):
            if complex_allowed and index >= 4 and not whole:
                break                                       # branch cuts: explicit i, positive symbols only
            at = Evaluator(index, whole, self.budget)
            try:
                x, y = at.value(a), at.value(b)
            except Undefined:
                if self.budget[0] < 0:
                    raise
                continue
            same = self.close(at, x, y, a, b)
            if complex_allowed or not (at.left_reals or isinstance(x, at.ctx.mpc) or isinstance(y, at.ctx.mpc)):
                if not same:
                    return False
                good += 1
            else:
                complex_good, complex_bad = complex_good + same, complex_bad or not same
        return good >= 2 or complex_good >= 2 and not complex_bad

    def close(self, at: Evaluator, x, y, a: Node | None = None, b: Node | None = None) -> bool:
        """Whether two values are the same number, of any size: relative difference below 10^-NOISE."""
        if isinstance(x, Fraction) and isinstance(y, Fraction):
            return x == y
        tiny = -3 * NOISE                                    # in bits, above 10^-NOISE
        if a is not None and (at.magnitude(x) < tiny or x == 0) and (at.magnitude(y) < tiny or y == 0):
            finer = Evaluator(at.index, at.whole, self.budget, 2 * DIGITS + 20, dict(at.env))
            x, y = finer.num(finer.value(a)), finer.num(finer.value(b))
            zero = [finer.magnitude(v) < -8 * NOISE or v == 0 for v in (x, y)]
            return all(zero) and not (isinstance(a, Num) and a.value) or not any(zero) and abs(x - y) <= abs(x) * finer.ctx.mpf(10) ** -NOISE
        ctx = context(at.digits)
        x, y = at.num(x), at.num(y)
        return abs(x - y) <= max(abs(x), abs(y)) * ctx.mpf(10) ** -NOISE

    def literal(self, at: Evaluator, x, y, a: Node, b: Node) -> bool:
        """A decimal literal of at least `LITERAL_DIGITS` digits against an exact value that it rounds to."""
        for node, other in ((a, b), (b, a)):
            if isinstance(node, Num) and node.digits >= LITERAL_DIGITS and not (isinstance(other, Num)):
                difference, size = abs(at.num(x) - at.num(y)), abs(at.num(node.value))
                unit = at.ctx.mpf(10) ** (int(at.ctx.floor(at.ctx.log10(size))) + 1 - node.digits)
                if difference <= unit:
                    return True
        return False


# ------------------------------------------------------------------------------------------------ questions of form


def names_of_symbols(node: Node) -> set[str]:
    return {name for name in names_of(node) if name[0] != "@"}


def is_constant(node: Node) -> bool:
    return isinstance(node, Num | Op | Quantity) and not names_of_symbols(node)


def infinity(node: Node) -> int:
    """1 for infinity, -1 for minus infinity, 0 for all else."""
    if isinstance(node, Op) and node.head == "inf":
        return 1
    if isinstance(node, Op) and node.head == "neg":
        return -infinity(node.args[0])
    return 0


def is_label(node: Node) -> bool:
    """Whether a tree can name a value: x, x_1, f(x), |AB|, AB, the angle ABC, (p, q)."""
    if isinstance(node, Sym):
        return True
    if isinstance(node, Seq):
        return node.kind == "tuple" and all(map(is_label, node.items))
    if isinstance(node, Ratio):
        return all(map(is_label, node.parts))
    if not isinstance(node, Op):
        return False
    if node.head in ("call", "sub"):
        return all(isinstance(arg, str | Num) or is_label(arg) or node.head == "sub" for arg in node.args)
    if node.head in ("e", "i"):                                   # as in AE = 5
        return False
    if node.head in ("abs", "min", "max", "gcd", "lcm", "arg", "det"):
        return all(names_of_symbols(arg) for arg in node.args)
    return is_word_label(node)


def is_word_label(node: Node) -> bool:
    """A product of capital letters (`AB`, a segment), or of an m and an angle."""
    if not isinstance(node, Op) or node.head != "*":
        return False
    names = [factor.name if isinstance(factor, Sym) else "" for factor in node.args]
    return all(n[:1].isupper() for n in names) or len(names) == 2 and names[0] == "m" and names[1].startswith("\\angle")


def same_function(a: Node, b: Node) -> dict[str, Node] | None:
    """The renaming of arguments that turns label `b` into label `a`: f(t) into f(x)."""
    if not all(isinstance(n, Op) and n.head == "call" and len(n.args) > 1 for n in (a, b)) or len(a.args) != len(b.args):
        return None
    if a.args[0] != b.args[0] or not all(isinstance(x, Sym) for n in (a, b) for x in n.args[1:]):
        return None
    return {y.name: x for x, y in zip(a.args[1:], b.args[1:])}


def substitute(node, values: dict[str, Node]):
    """The tree with symbols replaced."""
    if isinstance(node, Sym):
        return values.get(node.name, node)
    if isinstance(node, Op):
        return Op(node.head, tuple(substitute(arg, values) for arg in node.args))
    if isinstance(node, Seq):
        return Seq(node.kind, [substitute(item, values) for item in node.items], node.ends)
    return node


def count_heads(node, head: str) -> int:
    if isinstance(node, Op):
        return (node.head == head) + sum(count_heads(arg, head) for arg in node.args)
    if isinstance(node, Seq):
        return sum(count_heads(item, head) for item in node.items)
    if isinstance(node, Rel):
        return sum(count_heads(term, head) for term in node.terms)
    return count_heads(node.value, head) if isinstance(node, Quantity) else 0


def choose(node, signs: list[int], together: bool):
    """The tree with its plus-minus signs chosen: in order from `signs`, or all the first one (minus-plus: its opposite)."""
    rest = list(signs)

    def walk(node):
        if isinstance(node, Op):
            if node.head in ("pm", "mp"):
                sign = rest[0] if together else rest.pop(0)
                inner = walk(node.args[0])
                return inner if (sign > 0) == (node.head == "pm") else Op("neg", (inner,))
            return Op(node.head, tuple(map(walk, node.args)))
        if isinstance(node, Seq):
            return Seq(node.kind, list(map(walk, node.items)), node.ends)
        if isinstance(node, Rel):
            return Rel(list(map(walk, node.terms)), node.ops)
        return Quantity(walk(node.value), node.unit) if isinstance(node, Quantity) else node

    return walk(node)


def negative_base(node) -> bool:
    """Whether a negative number is raised to a power with symbols, as in `(-1)^n`."""
    if not isinstance(node, Op):
        return False
    if node.head == "^" and isinstance(node.args[0], Op) and node.args[0].head == "neg" and names_of_symbols(node.args[1]):
        return not names_of_symbols(node.args[0])
    return any(map(negative_base, node.args))


def without_letter_unit(node: Node) -> Node | None:
    """`5` of `5m`, `5 m^2`, `5 m/s`: a numeral times letters that are units; None for all else."""
    if isinstance(node, Op) and node.head in ("*", "/"):
        value, *units = node.args
        for unit in units:
            if isinstance(unit, Op) and unit.head == "^" and isinstance(unit.args[1], Num):
                unit = unit.args[0]
            if not isinstance(unit, Sym) or unit.name not in SINGLE_LETTERS:
                return None
        return value if isinstance(value, Num) else without_letter_unit(value)
    return None
