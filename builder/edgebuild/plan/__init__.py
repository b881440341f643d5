"""The plan: every decision of a build, made by pure functions on plain numbers. Imports no torch."""

from edgebuild.plan.assemble import plan_for
from edgebuild.plan.from_profile import DrafterShape, limits_from, make_plan
from edgebuild.plan.memory import Ledger, LedgerLine, ModelShape
from edgebuild.plan.records import Limits, Plan
from edgebuild.plan.tuned import Tuned

__all__ = [
    "DrafterShape",
    "Ledger",
    "LedgerLine",
    "Limits",
    "ModelShape",
    "Plan",
    "Tuned",
    "limits_from",
    "make_plan",
    "plan_for",
]
