"""nano-exgrpo: GRPO with experience replay, small enough to hold in the head.

Read the files in the order of the method; each knows only those above it:

    questions   the questions, where they come from, and the order they are asked in
    latex       LaTeX and plain maths text -> a tree, by a recursive-descent parser
                (around it, in order: tokens, units, tree, expressions; values, reals, equality, words)
    checker     a response and a known answer -> reward 0 or 1
    policy      the language model: prompts, token log-probabilities, entropies
    rollout     K sampled responses per question: `Trajectory`
    replay      the buffer of past successes: which question, which trajectory to replay
    loss        group advantages, the clipped on-policy term, the shaped replay term
    toy         a tiny tokenizer and policy that learn in a minute on a laptop
    checkpoint  save and resume
    runlog      metrics, samples, plots
    config      every setting, its unit and the paper's value

`train.py` wires them together as the eight steps of the method; `eval.py` measures the result.
"""
