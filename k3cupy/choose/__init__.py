"""Which configuration a call gets, decided once: measured tables first, then a rule.

Four origins, the first that knows a problem answers, for every kernel: what ``tune`` measured on
this machine (``user``), what the package ships for this very GPU (``shipped``), figures that others
published for its architecture (``public``), and the rule of the kernel (``rule``).
"""
