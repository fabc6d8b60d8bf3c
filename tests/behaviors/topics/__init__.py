"""One file per topic. Every public function with the parameter ``api`` is a behavior and returns what a script sees."""
