"""Questions asked of a script. Offers :func:`prove`: is it the same training on N workers as on one?"""

from ronde.study.prove import PlanVerdict, Verdict, prove

__all__ = ["PlanVerdict", "Verdict", "prove"]
