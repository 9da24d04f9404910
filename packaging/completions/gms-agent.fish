complete -c gms-agent -l listen -d 'Address or host name, and UDP port, to listen on; port 0 takes a free one' -r
complete -c gms-agent -l export -d 'Memory to export: 512M, 4G, or a share of all memory (of the machine, or what its cgroup allows), as 40%; or auto, what the host can spare from moment to moment, as auto:1G..16G at least and at most so much' -r
complete -c gms-agent -l keys -d 'Directory with ca.pem, node.pem, node-key.pem; revoked.txt if somebody was revoked, allowed.txt if not everybody may use it' -r -F
complete -c gms-agent -l metrics -d 'Address or host name, and TCP port, to serve metrics on, at /metrics, for Prometheus [default: none]' -r
complete -c gms-agent -l join -d 'Agents of the cluster to become a member with; may be given several times, and each may be a name with many addresses. Without it the agent is a member that others join' -r
complete -c gms-agent -l zone -d 'Where this machine stands, as rack-7: members are told [default: none]' -r
complete -c gms-agent -l threads -d 'Threads that serve, 1 to 16, each kept to one NUMA node if there are several; links are divided among them [default: half of the CPUs that the agent may use, at least 1 and at most 8]' -r
complete -c gms-agent -l spin -d 'Longest spin before blocking, in microseconds; 0 never spins [default: 50]' -r
complete -c gms-agent -l drain -d 'On SIGTERM or SIGINT wait so long for workloads to end or to take their pages away [default: 60]' -r
complete -c gms-agent -l config -d 'TOML file with these options as keys, e.g. `export = "4G"`; the command line wins' -r -F
complete -c gms-agent -l huge -d 'Export huge pages of 2 MiB; as many must be free (vm.nr_hugepages)'
complete -c gms-agent -l check -d 'Say what the agent would lack with these options, and what to do, instead of serving'
complete -c gms-agent -s q -l quiet -d 'Log errors only'
complete -c gms-agent -s v -l verbose -d 'Log more; twice for everything'
complete -c gms-agent -s h -l help -d 'Print help (see more with \'--help\')'
complete -c gms-agent -s V -l version -d 'Print version'
