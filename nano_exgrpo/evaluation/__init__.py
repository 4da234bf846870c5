"""Measuring. In reading order:

settings      eval.py's settings
benchmarks    which questions: the paper's nine data sets as a table
evaluate      K responses to each, in batches that can be repeated, resumed and halved
generations   what an evaluation keeps on disk: graded responses, streamed as they come
statistics    intervals, pass@k, maj@k, paired tests
figures       generations -> accuracies with their intervals; two evaluations -> which is better
study_report  what study.py's runs say
html_report   one run, or two side by side, as a page: curves, and responses coloured by entropy
"""
