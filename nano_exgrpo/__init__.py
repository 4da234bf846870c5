"""nano-exgrpo: GRPO with experience replay, small enough to hold in the head.

Read the files in this order. A file knows only the files above it:

    errors         the sentences with which a command ends early
    questions      what is asked, where it comes from, in which order
    trajectory     one response to one question, with all that the method needs to know about it
    logprobs       log-probability and entropy of each token, without ever holding the logits
    policy         the language model at a temperature: prompts, stop tokens, scores
    toy            sums, a tokenizer and a tiny policy that learn in a minute on a laptop
    arithmetic     questions in words for a real small model
    sampling_loop  the loop over tokens, written out
    rollout        K sampled responses a question, by HF `generate` or that loop
    reward         a response and the known answer -> 0 or 1
    loss           group advantages, the clipped fresh term, the shaped replayed term
    replay         the buffer: which question to ask again, which success to replay
    config         every setting, its bounds and the paper's value
    update         one step's update, in micro-batches
    warmup         learning from demonstrations, before there are rewards

Then read `train_step` in train.py: it is the method in eight steps. Around it stand three folders, each with a map of
its own:

    checker        is this answer equal to that one? A small compiler front end for mathematics; it needs no other file
    infra          what stands around the loop: folders, checkpoints, precision, memory, several devices
    evaluation     measuring: benchmarks, intervals, studies, a page to look at
"""
