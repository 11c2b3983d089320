"""Pipeline parallelism: schedules as tables, the simulator that proves them, the executor that runs them."""
