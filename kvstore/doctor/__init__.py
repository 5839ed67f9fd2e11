"""`kvstore doctor`: what of this machine is set badly for a daemon, and how to mend it.

`facts` reads, `probes` measure, `checks` judge: pure functions from facts to findings.
"""

from kvstore.doctor.checks import CHECKS
from kvstore.doctor.facts import Facts, Setup, read_facts
from kvstore.doctor.findings import Finding, Verdict, worst

__all__ = ["CHECKS", "Facts", "Finding", "Setup", "Verdict", "read_facts", "worst"]
