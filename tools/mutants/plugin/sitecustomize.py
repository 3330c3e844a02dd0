"""Python imports this module at the start of each process that a traced test starts."""

import os

if os.environ.get("MUTANTS_TRACE"):
    import mutants_plugin

    mutants_plugin.start_tracing()
