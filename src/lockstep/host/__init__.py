"""What this host gives: cores, memory limits, accelerators, network interfaces, routes and ports."""
