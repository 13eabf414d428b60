"""What a plan would take: time and memory of a step, from a model's costs and a cluster's links.

Offers :class:`~ronde.predict.predict.Predictor`, :func:`~ronde.predict.search.search` over all
plans, and :func:`~ronde.predict.answer.explain`, which says why. Pure arithmetic: no torch, no
processes.
"""
