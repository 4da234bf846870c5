"""nano-exgrpo: GRPO with experience replay, small enough to hold in the head.

Read the files in the order of the method; of these, each knows only those above it:

    questions    the questions, where they come from, and the order they are asked in
    checker      a response and a known answer -> reward 0 or 1
    policy       the language model: prompts, token log-probabilities, entropies
    rollout      K sampled responses per question: `Trajectory` (decode: the loop inside `generate`, written out)
    replay       the buffer of past successes: which question, which trajectory to replay
    loss         group advantages, the clipped on-policy term, the shaped replay term
    toy          a tiny tokenizer and policy that learn in a minute on a laptop
    config       every setting, its unit and the paper's value
    update       one step's update, in micro-batches
    warmup       learning from demonstrations, before there are rewards
    start        what the loop starts from

`train.py` wires them together as the eight steps of the method. What stands behind and around it:

    checkpoint   save and resume                          runlog, metrics  what a run leaves behind
    optim, lora  optimisers and adapters for small GPUs   memory           will it fit?
    distributed  several devices

    the checker   a small compiler front end for mathematics; `checker` names its files in reading order
    measuring     evaluate, generations (and where a reward is given); stats, benchmarks (`eval.py`); report
    (`study.py`);
                  htmlreport
"""
