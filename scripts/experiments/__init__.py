"""Experiments on top of EPS: a folder each, with a README, one command and its modules. No package imports them."""
