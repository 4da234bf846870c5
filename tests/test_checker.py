"""The policy of the checker, one representative a line; hostile input; the public bars on the handed cases."""

import ast
import json
import math
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from nano_exgrpo.checker import extraction, is_equal, reward
from nano_exgrpo.checker.evaluator import sample
from nano_exgrpo.checker.parser import parse_latex

ROOT = Path(__file__).resolve().parent.parent
HANDED = ROOT.parent / "shared" / "checker" / "handed.jsonl"
KINDS = [line.split("\t") for line in (ROOT / "tests" / "checker_kinds.tsv").read_text().splitlines()[1:]]
SLOWEST = 0.25  # seconds of its thread's CPU time that any verdict may take

EQUAL = [
    # exact values
    ("0.25", "1/4"),
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"\sqrt{7-4\sqrt3}", r"2-\sqrt3"),
    (r"\frac{1+i}{2}", r"\frac{1}{1-i}"),
    ("2^{100}", "4^{50}"),
    (r"\tan^2 y+1", r"\sec^2 y"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"-\tau\ln\Delta", r"\tau\ln\frac{1}{\Delta}"),
    (r"\sqrt x\sqrt y", r"\sqrt{xy}"),
    (r"\lceil n/2\rceil", r"\lfloor\frac{n+1}{2}\rfloor"),
    (r"\binom{2n}{n}", r"\frac{(2n)!}{(n!)^2}"),
    ("(-1)^n", r"\cos(n\pi)"),
    (r"\frac{\log 2}{\log 3}", r"\log_3 2"),
    ("0", r"\sqrt2\sqrt3-\sqrt6"),
    # percent, degrees, units
    (r"28\%", "0.28"),
    (r"28\%", "28 percent"),
    ("0.335", r"33.5\%"),
    (r"28\%", "28"),
    (r"90^\circ", "90"),
    (r"90^\circ", r"\frac{\pi}{2}"),
    (r"15\mbox{ cm}^2", "15"),
    ("15", r"15\text{ square inches}"),
    (r"864\mbox{ inches}^2", r"864\text{ square inches}"),
    ("9500", r"\$9{,}500"),
    (r"60\text{ mph}", r"60\text{ miles per hour}"),
    (r"3\text{ hours}", r"180\text{ minutes}"),
    ("1000.99", "1,000.99m²"),
    ("12", "12 students"),
    # labels and equations
    ("5", "x=5"),
    ("x=5", "5"),
    ("2=x", "x=2"),
    ("f(x)=x^2", "x^2"),
    ("f(x)=x^2", "f(t)=t^2"),
    ("1", "|AB|=1"),
    ("60", r"\angle ABC=60^\circ"),
    ("12", r"\text{Area}=12"),
    ("1/3", r"x=\frac13\approx 0.333"),
    ("6", r"x=2\cdot3=6"),
    ("2x+4y-3=0", r"y=-\frac12x+\frac34"),
    ("y=2x", "4x-2y=0"),
    ("f(n)=n^2", r"f(n)=n^2\text{ for all }n"),
    ("ax+b", "b+ax, where b is odd"),
    (r"\frac{\pi}{6}+\pi k", r"\frac{\pi}{6}+k\pi, k\in\mathbb{Z}"),
    # lists, sets, tuples
    ("1,-2", "-2, 1"),
    (r"\{1,2\}", "2,1"),
    (r"19, 46, \text{ and } 82", "82,19,46"),
    ("n=1, 2", "2,1"),
    (r"3\pm\sqrt2", r"3-\sqrt2, 3+\sqrt2"),
    (r"(\pm1,\pm2)", "(1,2),(1,-2),(-1,2),(-1,-2)"),
    (r"(\pm1,\mp2)", "(1,-2),(-1,2)"),
    ("(1,2)", "x=1, y=2"),
    ("(p,q)=(3,2)", "(3,2)"),
    (r"\emptyset", r"\{\}"),
    (r"\{1,2\}\cup\{3\}", r"\{1,2,3\}"),
    ("100,200,300", "300, 200, 100"),
    ("(1,2),(3,4)", "(3,4) and (1,2)"),
    # intervals and inequalities
    ("(0,12.5)", "0<x<12.5"),
    (r"m\in[\sqrt2,+\infty)", r"m\ge\sqrt2"),
    (r"(-\infty,-5]\cup[5,\infty)", r"|x|\ge5"),
    ("[-1,3]", r"|x-1|\le2"),
    (r"(-\infty,1)\cup(1,\infty)", r"\mathbb{R}\setminus\{1\}"),
    (r"(-\infty,1)\cup(1,\infty)", r"x\ne1"),
    ("(3,4]", r"4\ge x>3"),
    ("x>3", "2x>6"),
    ("(2,5)", "x>2, x<5"),
    ("(1,2]\\cup(2,3)", "(1,3)"),
    ("x<2 or x>3", r"(3,\infty)\cup(-\infty,2)"),
    ("a<b", "b>a"),
    (r"(-\infty,0)\cup(0,\infty)", "ℝ∖{0}"),
    (r"\mathbb{R}", "all real numbers"),
    # matrices, ratios, bases, words
    (r"\begin{pmatrix}1/2\\1\end{pmatrix}", r"\frac12\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"\begin{pmatrix}6&8\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}+\begin{pmatrix}5&6\end{pmatrix}"),
    ("7:32", "7 : 32"),
    ("3:4", "6:8"),
    (r"3:30\text{ PM}", "3:30 p.m."),
    ("52_8", "52_{8}"),
    ("Yes", r"\text{yes}"),
    (r"\text{(C)}", "C"),
    (r"\text{Evelyn}", r"\textbf{Evelyn.}"),
    ("odd $n$", r"\text{odd } n"),
    ("B", r"\textbf{(B) }12"),
    ("12", r"\textbf{(B) }12"),
    (r"\text{no solution}", r"\varnothing"),
    (r"\infty", "infinity"),
    ("4.12310562561766", r"\sqrt{17}"),
    ("9^{9^{9^9}}", "9^{9^{9^9}}"),
    # equations up to a factor that makes no solution; quadratic inequalities
    (r"y=\frac1x", "xy=1"),
    (r"y=\frac{2}{x+1}", "y(x+1)=2"),
    ("PV=nRT", r"P=\frac{nRT}{V}"),
    (r"y=\frac{\pi}{x}", r"xy=\pi"),
    (r"m\frac{dv}{dt}+bv=f", r"\frac{dv}{dt}=\frac{f-bv}{m}"),
    ("(-3,3)", "x^2<9"),
    (r"(-\infty,-1]\cup[4,\infty)", r"x^2-3x-4\ge0"),
    ("(1,3)", "-x^2+4x-3>0"),
    (r"(-3,-1)\cup(1,3)", "1<x^2<9"),
    ("[-3,3]", r"0\le x^2\le9"),
    (r"(-2,-1]\cup[1,2)", r"1\le|x|<2"),
    (r"\emptyset", "x^2<0"),
    (r"\mathbb{R}\setminus\{2\}", "(x-2)^2>0"),
    (r"x\ne\pm2", r"x^2\ne4"),
    ("1,-1,3", r"x\in\{3,\pm1\}"),
    # compound quantities, multiples, transposed tuples
    (r"90\text{ minutes}", r"1\text{ hour }30\text{ minutes}"),
    ("74 inches", r"6\text{ ft }2\text{ in}"),
    (r"\$3.50", "3 dollars and 50 cents"),
    ("15000000", "15 million"),
    ("300000", "300 thousand dollars"),
    (r"2.5\times10^5\text{ J}", r"250\text{ kJ}"),
    (r"\begin{pmatrix}1\\2\\3\end{pmatrix}", "(1,2,3)^T"),
    # where sympy's canonical form decides
    (r"\int_0^1 x^2 dx", r"\int_0^1 t^2\,dt"),
    (r"\sum_{k=1}^\infty\frac1{k^2}", r"\sum_{n=1}^\infty\frac{1}{n^2}"),
    (r"\sqrt2+10^{-50}", r"10^{-50}+\sqrt2"),
    (r"10^{50}+\sqrt8", r"2\sqrt2+10^{50}"),
    (r"\ln(x^2)", r"2\ln|x|"),
    ("6", r"\sum_{i=0}^{3} i"),
    ("500500", r"\sum_{k=1}^{1000} k"),
    # an unbraced argument is one token; mixed numbers stay whole
    ("50", r"10^2\frac12"),
    ("-3", r"\log_2\frac18"),
    (r"\frac16", r"\frac12\frac13"),
    (r"\frac{\sqrt3}2", r"\sqrt3\frac12"),
    ("10^{5/2}", r"10^{2\frac12}"),
    # units behind labels, in brackets, with prefixes; degrees and radians; multiples
    (r"2\text{ m}", r"x=200\text{ cm}"),
    (r"12\text{ cm}", r"12\text{ cm}=0.12\text{ m}"),
    (r"x=12\text{ cm}", "12"),
    ("5", r"5\ (\text{cm})"),
    (r"5\text{ m/s}", r"5\ [\text{m/s}]"),
    (r"5\text{ kN}", r"5000\text{ N}"),
    (r"3\text{ mA}", r"0.003\text{ A}"),
    (r"5\text{ Meters}", r"5\text{ meters}"),
    (r"45^\circ", r"\frac\pi4\text{ radians}"),
    (r"90^\circ-\frac\alpha2", r"\frac\pi2-\frac\alpha2"),
    (r"25^\circ\text{C}", "25"),
    (r"25^\circ C", r"25\text{ degrees Celsius}"),
    ("24", r"2\text{ dozen}"),
    (r"\frac23", r"2\text{ thirds}"),
    (r"20\text{ square units}", r"20\text{ cm}^2"),
    ("500", r"\text{Rs. }500"),
    # subscripts however written; scripts in either order
    ("k_BT", r"k_{\mathrm B}T"),
    ("v_f", r"v_{\text{f}}"),
    ("x_1^2", "x^2_1"),
    ("a_n^{-1}", "a^{-1}_n"),
    # sets: builders, finite ones, named integers, congruences, inequalities around an absolute value
    (r"(2,\infty)", r"\{x\in\mathbb{R}\mid x>2\}"),
    (r"\{n\in\mathbb{Z}:n>5\}", r"n>5, n\in\mathbb{Z}"),
    (r"\{2,3\}\cap\{3,4\}", r"\{3\}"),
    ("3,4,5", r"\{3\}\cup\{4\}\cup\{5\}"),
    (r"[0,\infty)", r"\mathbb R_{\ge0}"),
    (r"x=k\pi, k\in\mathbb{Z}", r"x=n\pi\ (n\in\mathbb{Z})"),
    (r"x\equiv3\pmod7", r"x\equiv-4\pmod7"),
    ("(-10,2)", "2|x+4|<12"),
    (r"\mathbb{R}\setminus\{1\}", r"\text{all real numbers except }1"),
    # layout and spellings
    ("5", r"\begin{aligned} x &= 5 \end{aligned}"),
    ("x=1,y=2", r"\begin{aligned}x&=1\\y&=2\end{aligned}"),
    (r"\frac12", r"\nicefrac12"),
    ("x^2y", "x^2{}y"),
    (r"\bar z", r"\overline z"),
    ("1-2i", r"\overline{1+2i}"),
    ("25000", "2.5e4."),
    ("44_5", r"44_{\text{base }5}"),
    (r"9:05\text{ a.m.}", r"9{:}05\text{ AM}"),
    (r"\begin{pmatrix}2&1\\1&1\end{pmatrix}", r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^2"),
    ("|x-10|", "|10-x|"),
    (r"\sqrt{(x-5)^2}", "|x-5|"),
    (r"\text{YES}", r"\text{yes}"),
    ("(5,1)", "m=5, k=1"),
    # numbered symbols and calls as symbols; letters as units; numerals with letters; binomials and cis
    ("x_1+x_2=1", "2x_1+2x_2=2"),
    ("2x_1=6", "x_1=3"),
    ("a_1=2", "2"),
    (r"\sum_{k=1}^3 a_k", "a_1+a_2+a_3"),
    (r"2\text{ hours}", "2h"),
    (r"5\,\mathrm{m/s}^2", "5 m/s^2"),
    (r"60\text{ minutes}", "1 h"),
    ("13", "13 m"),
    ("3A7_{16}", "3A7_{16}"),
    ("100200", "100,200"),
    ("56", "{}_8C_3"),
    ("56", "^8C_3"),
    (r"1+\sqrt3 i", r"2\operatorname{cis}60^\circ"),
    ("2y=4x", "y=2x"),
    # a sum of different letters is a label; two numbers in a row may be a point
    ("33", "m+n=33"),
    ("1,2", "(1,2)"),
    ("(100,200)", "100,200"),
]
ONE_WAY = [  # what an answer may add, a gold answer asks for
    ("ax+b", "b+ax, where b is odd"),
]
DIFFERENT = [
    # exact values
    ("1/3", "0.33"),
    (r"\pi", "3.14"),
    ("262537412640768744", r"e^{\pi\sqrt{163}}"),
    ("1/2^{99}", "1/2^{98}"),
    ("0", r"\frac{1}{3^{10^9}}"),
    ("0", "e^{-200}"),
    ("10000", "10001"),
    ("R+r", "2R"),
    ("Nn", "n^2"),
    (r"\alpha", "a"),
    (r"\sqrt{x^2}", "x"),
    ("|x|", "x"),
    (r"\lfloor x\rfloor", "x"),
    (r"\lfloor\frac{2n-1}{5}\rfloor", r"\lfloor\frac{2n+1}{5}\rfloor"),
    ("e^t/3", "e^{t/3}"),
    (r"\frac{a+b}{c}", r"a+\frac bc"),
    ("I(0)", "I(1)"),
    ("f(x)", "fx"),
    ("4.5e33", r"4.5e\cdot33"),
    ("0", r"\frac00"),
    ("1", r"\frac{\text{any}}{\text{any}}"),
    (r"\dot x", "x"),
    ("2", r"\frac{dy}{dx}"),
    # percent, units
    (r"0.5\%", "0.5"),
    ("28", "0.28"),
    (r"90\text{ minutes}", r"90\text{ hours}"),
    (r"20\text{ cm}^2", r"20\text{ cm}^3"),
    (r"\$5", "5 cents"),
    (r"\frac{1}{\sqrt2}c", r"\frac{1}{\sqrt2}"),
    ("12", r"12\text{ is wrong}"),
    (r"12\text{ apples}", r"12\text{ pears}"),
    # labels and equations
    ("7=11a+c", "11a+c"),
    ("a+3z=0", "0"),
    ("3", "n=3k"),
    ("25", "24=25=26"),
    ("x=1", "y=1"),
    ("y=2x+3", "0=0"),
    ("y=2x+3", "y=y"),
    ("y=2x", "y=-2x"),
    ("f(x)=x^2", "g(x)=x^2"),
    ("6", "|x|=6"),
    ("MR=SRMC", "SRMC"),
    ("f(x)=ax+b, where b is odd", "f(x)=ax+b, where b is even"),
    # lists, sets, tuples
    ("1,2,3", "1,2"),
    ("1,2", "1,2,3"),
    (r"3\pm\sqrt2", r"3+\sqrt2,3+\sqrt2"),
    ("2", r"\pm2"),
    ("25", "25 or 26"),
    ("(1,2)", "(2,1)"),
    ("(3,1)", r"\{1,3\}"),
    ("(1,2)", "(1,2),(2,1)"),
    (r"\emptyset", "0"),
    (r"\emptyset", r"\{0\}"),
    ("9500", "9,5,0,0"),
    ("2, 3", "23"),
    ("2", "(0,1)"),
    # intervals
    ("(0,9)", "[0,9)"),
    ("(0,12.5)", r"0\le x\le12.5"),
    (r"(-\infty,1)\cup(1,\infty)", r"\mathbb{R}"),
    ("5", "[0,10]"),
    ("x>3", "y>3"),
    ("a<b", r"a\le b"),
    (r"x\ge5", "5"),
    ("(3,4]", "4"),
    ("[1,2]", r"\{1,2\}"),
    ("(0,1)", "(1,0)"),
    # matrices, ratios, bases, words
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("7:32", "32:7"),
    ("1:2", "12"),
    ("3:05", "3:5"),
    (r"3:30\text{ PM}", r"3:30\text{ AM}"),
    ("52_8", "528"),
    ("52_8", "52_9"),
    ("1010_2", "10"),
    (r"\text{yes}", r"\text{no}"),
    ("C", "c"),
    ("B", r"\text{B, C}"),
    (r"\text{even}", r"\text{even or odd}"),
    ("1", r"\text{True}"),
    ("0", r"\text{None}"),
    # equations with other solutions
    ("y=1", "x(y-1)=0"),
    (r"M=\frac{9}{32}\sqrt2", "n=k+4"),
    (r"x=y+\sqrt2", r"(x-y-\sqrt2)(x+y)=0"),
    ("f(n)=n", "f(m)=n"),
    ("x=1", "x^2=x"),
    ("xy=1", r"y=-\frac1x"),
    ("y^2=4x", r"y=2\sqrt x"),
    ("PV=nRT", r"P=\frac{nRV}{T}"),
    (r"\pm2", "x^2=4"),
    ("(-3,3)", r"x^2\le9"),
    ("(1,3)", "-x^2+4x-3<0"),
    (r"90\text{ minutes}", r"1\text{ hour }20\text{ minutes}"),
    ("15", "15 million"),
    (r"\ln|x|", r"\ln x"),
    # where sympy's canonical form decides
    (r"\int_0^1 x^2 dx", r"\int_0^1 t^3\,dt"),
    (r"\sum_{k=1}^\infty\frac1{k^2}", r"\sum_{n=2}^\infty\frac{1}{n^2}"),
    (r"\sqrt2", r"\sqrt2+10^{-50}"),
    (r"\pi", r"\pi+10^{-1000}"),
    (r"\sqrt2", r"\sqrt2+e^{-200}"),
    (r"10^{50}+\pi", "10^{50}+3"),
    ("1", "e^{10^{-60}}"),
    (r"\sqrt x", r"\sqrt x+10^{-50}"),
    # an unbraced argument is one token
    ("10^{5/2}", r"10^2\frac12"),
    (r"\frac37", r"\frac12\frac13"),
    (r"\sqrt{\frac72}", r"\sqrt3\frac12"),
    # units behind labels, of other case or power, of temperature; words that are none
    (r"12\text{ cm}", r"x=12\text{ m}"),
    (r"10\text{ m/s}", r"v=10\text{ km/h}"),
    (r"\$5", r"x=5\text{ cents}"),
    (r"4\text{ cm}, 5\text{ cm}", r"a=4\text{ m}, b=5\text{ m}"),
    (r"3\text{ MW}", r"3\text{ mW}"),
    (r"2\text{ Mg}", r"2\text{ mg}"),
    (r"25^\circ C", r"25^\circ F"),
    (r"25^\circ\text{C}", r"25\text{ K}"),
    (r"30\text{ degrees}", r"30\text{ rad}"),
    (r"45^\circ", r"45\text{ cm}"),
    (r"36\text{ square units}", r"36\text{ cubic units}"),
    (r"20\text{ square units}", r"20\text{ cm}^3"),
    (r"20\text{ square units}", r"20\text{ kg}"),
    ("12", r"12\text{ dozen}"),
    ("2", r"2\text{ thirds}"),
    ("3", r"3\text{ squared}"),
    ("31", r"31\text{ excluded}"),
    ("8", r"\frac8m"),
    # times, thousands, names: not proportional, not lists, in their order
    (r"4:30\text{ PM}", r"2:15\text{ PM}"),
    (r"10:30\text{ AM}", "1:3"),
    ("1,000", "1, 0"),
    ("12,007", "7,12"),
    (r"1,000", r"\{0,1\}"),
    ("1,000, 2,000", "1, 0, 2, 0"),
    ("(15,-29)", "y=15, x=-29"),
    ("(2,3)", "b=2, a=3"),
    # several cases, denials, words by their case
    ("5", r"5\text{ for }n=1, 6\text{ for }n=2"),
    ("31", r"31\text{ for sure, or }32"),
    ("f(x)=x", r"f(x)=x\text{ for }x\ge0, f(x)=-x\text{ for }x<0"),
    ("31", r"\text{not} = 31"),
    ("31", r"\text{The answer is not: } 31"),
    (r"\text{AaBb}", r"\text{aabb}"),
    (r"\mathrm{CO}", r"\mathrm{Co}"),
    # sets that are no intervals; other congruences and integers; other subscripts and arrows
    (r"\{2k\mid k\in\mathbb{Z}\}", r"\{2k+1\mid k\in\mathbb{Z}\}"),
    (r"(2,\infty)", r"\{2x:x>2\}"),
    (r"(5,\infty)", r"\{n\in\mathbb{Z}:n>5\}"),
    ("(1,4)", r"1<x<4, x\in\mathbb{Z}"),
    ("x>2", r"\lfloor x\rfloor>2"),
    (r"(-\infty,2)", "2|x+4|<12"),
    ("x<2", "|x+4|-6<0"),
    ("5", r"[0,5]\cap[5,6]\cup\{7\}"),
    (r"x\equiv3\pmod7", r"x\equiv4\pmod7"),
    (r"x\equiv3\pmod7", r"x\equiv3\pmod8"),
    (r"k\pi, k\in\mathbb{Z}", r"2n\pi, n\in\mathbb{Z}"),
    ("k_BT", "k_bT"),
    ("v_f", r"v_{\text{F}}"),
    ("x_1^2", "x^1_2"),
    (r"\overrightarrow{AB}", r"\overrightarrow{BA}"),
    # where expressions turn at the numbers in them
    ("10-x", "|x-10|"),
    ("9-2x", "|2x-9|"),
    ("10", r"\max(x,10)"),
    ("5-x", r"\sqrt{(x-5)^2}"),
    (r"\lfloor\frac{n}{2024}\rfloor", r"\lfloor\frac{n}{2025}\rfloor"),
    (r"\binom n{50}", "0"),
    (r"\gcd(n,2027)", "1"),
    ("n", r"n\bmod100"),
    (r"\ln(x+7)", r"\ln|x+7|"),
    # what 60 digits hide
    ("5", r"5+10^{-50}\pi x"),
    (r"2\pi", r"2\pi+10^{-50}\sin x"),
    (r"\pi", r"\pi+\frac{x}{10^{60}}"),
    (r"\sqrt2", r"\sqrt2+10^{-9000}\pi"),
    # numbered symbols and calls are symbols like others, not one constant
    ("x_1=3", "x_1=4"),
    ("x_1=3", "x_2=3"),
    ("x_1=-3", "x_1=3"),
    ("a_5=31", "a_5=63"),
    ("S_{100}=5050", "S_{100}=4950"),
    ("f(2)=3", "f(2)=5"),
    ("P(3)=1/3", "P(3)=2/3"),
    ("f'(2)=3", "f'(2)=4"),
    ("x_1>2", "x_1>3"),
    ("x_1=1, x_2=2", "x_1=2, x_2=1"),
    ("a_1+a_2=3", "a_1-a_2=3"),
    ("x_1=2x_2", "x_1=3x_2"),
    ("f(1)=f(2)", "f(1)=f(3)"),
    ("|m_1-m_2|", "m_1-m_2"),
    (r"\max(x_1,x_2)", "x_1"),
    (r"\sqrt{x_1^2}", "x_1"),
    # letters as units conflict like words; numerals with letters; large numbers in equations; tuples of three digits
    (r"15\text{ cm}", "15 m"),
    (r"15\text{ cm}^2", "15 m^2"),
    (r"2\text{ kg}", "2g"),
    (r"5\text{ N}", "5 J"),
    (r"3\text{ m/s}", "3m/s^2"),
    (r"60\text{ minutes}", "60h"),
    ("5 m", r"5\text{ cm}"),
    (r"5\text{ m/s}^2", "5 m/s^9"),
    ("3A7_{16}", "3A7_{12}"),
    ("A3_{16}", "A3_{12}"),
    ("3B_{16}", "B3_{16}"),
    ("3A7_{16}", "3A7"),
    ("y=e^{200}", "y=e^{200}+1"),
    (r"N=\pi^{100}", r"N=\pi^{100}+1"),
    (r"A>10^{60}\pi", r"A>10^{60}\pi+1"),
    ("100200", "(100,200)"),
    ("20160", "(20,160)"),
    ("(100,200)", "(200,100)"),
    ("100200", r"\{100,200\}"),
    # no value, or not this one
    ("25", r"\text{the reference}"),
    ("25", "x"),
    ("25", "?"),
    ("25", r"\phantom{25}"),
    ("7", "nan"),
    ("5", ""),
]


@pytest.fixture(scope="module", autouse=True)
def _sympy_is_imported():
    """So that no verdict's time holds the import, once a process, of what decides the rare ones."""
    parse_latex("x")


@pytest.mark.parametrize("gold, answer", EQUAL, ids=[" ~ ".join(c) for c in EQUAL])
def test_equal(gold, answer):
    assert is_equal(gold, answer) is True


@pytest.mark.parametrize("gold, answer", DIFFERENT, ids=[" ~ ".join(c) for c in DIFFERENT])
def test_different(gold, answer):
    assert is_equal(gold, answer) is False and is_equal(answer, gold) is False


def test_kinds_of_real_answers():
    wrong = [row for row in KINDS if is_equal(row[2], row[3]) is not (row[1] == "=")]
    assert not wrong


def test_equality_is_reflexive_and_symmetric():
    for gold, answer in EQUAL:
        assert is_equal(gold, gold) and is_equal(answer, answer), gold
        assert (gold, answer) in ONE_WAY or is_equal(answer, gold), (gold, answer)
    for kind, _, gold, answer in KINDS:
        assert is_equal(answer, answer + " ") and is_equal(gold, gold + " "), gold
        one_way = kind == "ratio" or "x" in gold + answer and kind == "letter sum"  # see the policy in `verdict`
        assert one_way or is_equal(answer, gold) is is_equal(gold, answer), (gold, answer)


def _timed(call, *arguments):
    """(result, seconds of this thread's CPU time), the least of up to three tries: a collection of garbage or a core that
    the machine takes away falls into one of them, a slow verdict into all."""
    least = math.inf
    for _ in range(3):
        start = time.thread_time()
        result = call(*arguments)
        least = min(least, time.thread_time() - start)
        if least < SLOWEST:
            break
        sample.cache_clear()
    return result, least


def _in_thread(call, *arguments):
    """(result, seconds of CPU time) of a call in a worker thread."""
    out = []

    def work():
        out.append(_timed(call, *arguments))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert out, "no verdict"
    return out[0]


HOSTILE = [
    "9^{9^{9^{9}}}",
    "10**10**10",
    "((9**9)**9999)**9999",
    "99999999999999!",
    "factorial(10000000000)",
    r"\binom{1000000}{500000}",
    "(x+1)^{1000000}",
    r"\prod_{k=1}^{1000000000}(k+\sqrt2)",
    r"\sum_{k=1}^{100}" * 6 + "k",
    r"\sum_{k=1}^{100}\frac{1}{k^{300}+k}",
    r"\lfloor 10^{5000}\pi\rfloor",
    r"\sin(10^{1000000})",
    "e^{e^{e^{10}}}",
    r"\log_{2}(2^{2^{2^{2^{2^2}}}})",
    "1" * 100_000,
    "{" * 5000 + "1" + "}" * 5000,
    r"\sqrt{" * 2000,
    "x(" * 1900,
    "x(1+" * 28 + "x" + ")" * 28,
    "a" * 3999,
    ",".join(rf"\sqrt{{{n}}}" for n in range(300)),
    r"[0,1]\cup" * 400 + "[2,3]",
    "1=" * 700 + "1",
    r"\pm1" * 10,
    r"\text{" * 600,
    "0." + "3" * 3900,
    "0." + "12345" * 700 + "...",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}" * 40,
    r"\sum_{n=1}^\infty((x+y+z+u+v+w)^8+1)\bmod((x+y+z+u+v+w)^7+x)",
    r"\sum_{n=1}^\infty(x^{5000}y+n)\bmod(x^7+x+y)",
    r"5+10^{-50}\pi(((x+y+z+u+v)^8(x-y)^8)\bmod((x+y+z+u+v)^7(x-y)^6+1))",
    r"\sum_{n=1}^\infty\min((x+y+z+u+v)^8,(x-y+z)^8)\bmod(x+y)",
    r"e!^{h c/\lambda k T}+0",
    r"\frac{8\pi hc}{\lambda^5}\frac{1}{e!^{hc/\lambda kT}-1}",
    "1e5000-1e-5000",
    r"\sum_{n=1}^\infty" * 8 + r"\frac{1}{n^2}",
    r"\sum_{n=1}^\infty\sum_{k=1}^{1000}\frac{1}{(nk)^{2}}",
    r"\prod_{n=1}^\infty\left(1+\frac{1}{n^{300}+\sqrt n}\right)",
    r"\sum_{n=1}^\infty\frac{n!!}{(n!)!}",
    r"\sum_{n=1}^\infty\frac{1}{n^{n^{n^n}}}",
    r"\lim_{x\to0}\frac{\Gamma(x)^{5000}}{\sin(1/x)}",
    r"\lim_{x\to\infty}x^{x^{x}}",
    r"\lim_{x\to0}" * 9 + "x",
    r"+".join([r"\sum_{n=1}^\infty\frac{\zeta(n+1)}{n^2+n+1}"] * 20),
    "(((1)^" * 300,
    "is " * 1_300,
    "twenty-" * 500,
    r"\frac{d^2y}{dx^2}=" * 40 + "y",
    r"\text{B) }" * 400,
    r"\begin{cases}" * 60,
    "5 apples of " * 300,
    "\0",
    "\u202e6",
    "(" * 4000,
    "5\\",
    "\\text{5\\}",
]
CODE = [
    "__import__('os').system('touch pwned')",
    "open('pwned','w')",
    "[open('pwned','w') for _ in [0]]",
    "().__class__.__base__.__subclasses__()",
    'lambdify([], Symbol(\'__import__("os").system("touch pwned")\'))()',
    "5 or __import__('os').system('touch pwned')",
    "$(touch pwned)",
    r"\input{/etc/hostname}",
    r"\write18{touch pwned}",
    "{{config}}",
    "%s%n",
    "raise SystemExit",
]


@pytest.mark.parametrize("text", HOSTILE + CODE, ids=[t[:24].replace("\0", "0") for t in HOSTILE + CODE])
def test_hostile_input_is_rejected_at_once_in_a_thread(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for gold in (
        "5",
        r"\sqrt2",
        "1,2",
        "x=5",
        r"\lfloor n\rfloor",
        r"\sum_{k=1}^\infty\frac1{k^2}",
        r"e!^{h c/\lambda k T}",
    ):
        verdict, seconds = _in_thread(is_equal, gold, text)
        assert verdict is False and seconds < SLOWEST
        assert _in_thread(reward, rf"so \boxed{{{text}}}", gold)[1] < SLOWEST
    assert not list(tmp_path.iterdir())


def test_long_responses_are_read_in_linear_time():
    for response, expected in (
        ("word " * 40_000 + r"\boxed{42}", 1.0),
        (r"\boxed{9} " * 20_000 + r"so \boxed{42}", 1.0),
        (r"\boxed{" * 20_000, 0.0),
        (r"\boxed" * 20_000, 0.0),
        ("$" * 100_000, 0.0),
        ("answer is " * 20_000, 0.0),
        ("\n" * 100_000 + r"\boxed{6}", 0.0),
        ("<answer>" * 20_000, 0.0),
        (r"\boxed{42},\boxed{" * 5_000, 0.0),
        ("</think>" * 20_000 + r"\boxed{42}", 1.0),
    ):
        value, seconds = _in_thread(reward, response, "42")
        assert value == expected and seconds < SLOWEST


_PIECES = (
    r"\frac { } ( ) [ ] ^ _ + - * / ! % \sqrt \sin \log_ x n e i 9 99 0 . , ; \pm = < \le \cup \{ \} | "
    r"\infty \pi \text{ \sum_{k=1}^{ \int \binom \lfloor \rfloor \begin{pmatrix} \end{pmatrix} & \\ \circ ° "
    r"½ ² √ mod \overline ' : \ldots 1e9 10^{ \left \right \lim_{x\to f( $ \gcd( \in \mathbb{R} \setminus "
    r"and or \angle \choose \frac12 9^9^9^9 999999! \tan \arcsin \cosh \min \vec \dot "
    r"\mathrm{"
).split()


def _fuzz(seed: int, count: int) -> list[float]:
    """The seconds of `count` verdicts on random strings and mutated answers."""
    rng = random.Random(seed)
    pool = [text for case in [*EQUAL, *DIFFERENT, *(row[2:] for row in KINDS)] for text in case if text]
    seconds = []
    for _ in range(count):
        if rng.random() < 0.4:
            text = "".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 30)))
        else:
            text = rng.choice(pool)
            for _ in range(rng.randint(1, 4)):
                at = rng.randint(0, len(text))
                text = rng.choice(
                    [
                        text[:at] + rng.choice(_PIECES) + text[at:],
                        text[:at] + text[at + rng.randint(1, 3) :],
                        text[:at] + rng.choice(pool)[:30] + text[at:],
                        text[:at] + text[at : at + 8] * rng.randint(2, 5) + text[at:],
                    ]
                )
        gold = rng.choice(pool) if rng.random() < 0.7 else text + "+0"
        verdict, taken = _timed(is_equal, gold, text)
        assert verdict in (True, False)
        seconds.append(taken)
    return sorted(seconds)


def test_fuzz():
    assert _fuzz(0, 6_000)[-1] < SLOWEST


def _lopsided(seed: int, count: int) -> list[tuple[str, str]]:
    """Mutated pairs whose verdict depends on which side is the gold answer, or that do not equal themselves."""
    rng = random.Random(seed)
    pairs = [*EQUAL, *DIFFERENT, *((gold, answer) for kind, _, gold, answer in KINDS if kind != "letter sum")]
    found = []
    for _ in range(count):
        gold, answer = rng.choice(pairs)
        at = rng.randint(0, len(answer))
        answer = rng.choice([answer[:at] + rng.choice(_PIECES) + answer[at:], answer[:at] + answer[at + 1 :]])
        if not answer.strip() or any(part in gold + answer for part in (":", "where", "with", "for", "to", "=")):
            continue  # a ratio, a condition or a label, which the policy may read one way only
        if is_equal(gold, answer) is not is_equal(answer, gold) or not is_equal(answer, answer + " "):
            found.append((gold, answer))
    return found


def test_mutated_answers_are_compared_alike_both_ways():
    assert _lopsided(0, 3_000) == []


@pytest.mark.slow
def test_fuzz_long():
    for seed in range(1, 5):
        assert _fuzz(seed, 20_000)[-1] < SLOWEST
    assert _lopsided(1, 20_000) == []


@pytest.mark.skipif(not HANDED.exists(), reason="the handed cases are not here")
def test_handed_cases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [json.loads(line) for line in HANDED.read_text().splitlines()]
    right, total, accepted, slowest = Counter(), Counter(), Counter(), []

    def work():
        for case in cases:
            value, taken = _timed(reward, case["response"], case["gold"])
            verdict = value == 1.0
            slowest.append(taken)
            total[case["kind"]] += 1
            right[case["kind"]] += verdict is case["expected"]
            accepted[case["kind"]] += verdict and not case["expected"]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    asked = [kind for kind in total if kind not in ("nobox", "convention")]
    assert sum(right[k] for k in asked) / sum(total[k] for k in asked) >= 0.993, right
    assert right["gold_self"] == total["gold_self"]
    assert not any(accepted[kind] for kind in ("hack", "near_miss", "cross_gold", "robust")), accepted
    assert sum(accepted.values()) <= 2, accepted
    assert max(slowest) < SLOWEST
    assert not list(tmp_path.iterdir())
    golds = {case["gold"] for case in cases}
    assert [g for g in golds if not is_equal(g, g)] == []


def test_only_the_standard_library_and_sympy_are_imported():
    """mpmath is the arithmetic of sympy: a part of each of its installations."""
    for path in sorted((ROOT / "nano_exgrpo" / "checker").glob("*.py")):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), path.name
        roots = {
            (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert roots <= set(sys.stdlib_module_names) | {"sympy", "mpmath", "nano_exgrpo"}, name
        functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {function.id for function in functions if isinstance(function, ast.Name)}
        methods = {function.attr for function in functions if isinstance(function, ast.Attribute)}
        assert not names & {"eval", "exec", "compile", "__import__"}, name
        assert not (names | methods) & {"sympify", "parse_expr", "lambdify", "simplify", "S"}, name


def test_the_import_is_light():
    script = (
        "import sys, nano_exgrpo.checker as c; assert c.is_equal('5', '5'); "
        "print(sorted(m for m in ('sympy', 'mpmath', 'torch') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_explains_a_verdict(capsys):
    assert extraction.main(["x=5", r"so \boxed{6}"]) == 0
    shown = capsys.readouterr().out
    for part in ("'6'", "x = 5", "Eq(x, 5)", "different rational numbers", "reward      0.0"):
        assert part in shown
    assert extraction.main(["5"]) == 2
