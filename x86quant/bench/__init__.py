"""``x86quant bench``: models on every back end that is installed, and pages about it.

``subjects`` finds a model, ``backends`` run it, ``one_model`` measures it in a process of its own,
which ``campaign`` starts for each model and setting; ``results`` is what comes of it, which
``summary_text`` and ``summary_page`` show and ``comparison`` judges.
"""
