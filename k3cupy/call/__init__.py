"""What every call does: probe, look up a plan, check addresses, fill arguments, launch.

Nothing here knows a kernel, a table or a public function.
"""
