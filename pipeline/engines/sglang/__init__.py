"""The SGLang engine: one role a replica, its scheduler in a process of its own, joined to the worker by a page ring.

Worker side: `engine` over `server` (SGLang's own engine), `prefill` and `admission` (what jobs hold), `link` (the other
end). Scheduler side: `plugin`. Between them: `message` and `ring`. Nothing is imported here: the scheduler process
imports the plug-in without the worker's half.
"""
