"""Who makes the processes: one module for each start method.

Each has a function `run(plan, task, ...)` that returns the outcomes of all ranks it knows of, in
rank order, or raises `supervise.Failure`.
"""
