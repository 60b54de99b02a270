"""Many runs: plan, skip what is done, execute. Start with plan.py."""
