"""Hyper-parameter search: what a trial is, how it is put into arguments and run on all ranks, and who proposes it."""
