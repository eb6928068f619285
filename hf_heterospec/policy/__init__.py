"""Policies: how deep to draft and how much to verify, decided from numbers.

| module | what | paper |
|---|---|---|
| `entropy` | the complexity quantifier H(P*) | section 3.1 |
| `rounds` | what a policy is asked and what it answers; the fixed tree | |
| `stratification` | entropy intervals by CART, and their tiers | sections 3.2, 3.3 |
| `throughput` | the tree with the most expected tokens per second | beyond the paper |
| `calibration` | draft confidence to acceptance probability | |
| `costs` | what passes cost on this machine | |
| `repository` | `policy.json`, loading and sharing | |
| `simulation` | any policy on recorded traces, without a model | |

Nothing in here knows a model: fitting and simulation run on recorded numbers (`hf_heterospec.traces`).
"""
