# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_gms_global_optspecs
    string join \n h/help V/version
end

function __fish_gms_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_gms_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_gms_using_subcommand
    set -l cmd (__fish_gms_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c gms -n "__fish_gms_needs_command" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_needs_command" -s V -l version -d 'Print version'
complete -c gms -n "__fish_gms_needs_command" -f -a "run" -d 'Run a command with a limit on its resident memory; the rest of its memory lives on agents'
complete -c gms -n "__fish_gms_needs_command" -f -a "attach" -d 'Page a process which runs already, and the processes below it, until it ends'
complete -c gms -n "__fish_gms_needs_command" -f -a "detach" -d 'Bring all pages of a workload home and leave it running'
complete -c gms -n "__fish_gms_needs_command" -f -a "status" -d 'Show the workloads which gms pages on this machine'
complete -c gms -n "__fish_gms_needs_command" -f -a "top" -d 'Watch the workloads live; q quits'
complete -c gms -n "__fish_gms_needs_command" -f -a "doctor" -d 'Check whether this machine can run gms; each finding comes with its cure'
complete -c gms -n "__fish_gms_needs_command" -f -a "keys" -d 'Make the keys of a cluster'
complete -c gms -n "__fish_gms_needs_command" -f -a "completion" -d 'Print the completion script of a shell'
complete -c gms -n "__fish_gms_needs_command" -f -a "man" -d 'Write the man pages of gms into a directory'
complete -c gms -n "__fish_gms_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gms -n "__fish_gms_using_subcommand run" -l local -d 'Most resident anonymous memory of the whole process tree (512M, 4G, or a share of all memory: 40%)' -r
complete -c gms -n "__fish_gms_using_subcommand run" -l page-size -d 'Memory fetched for one fault [default: 4k]' -r -f -a "4k\t'4 KiB'
8k\t'8 KiB'"
complete -c gms -n "__fish_gms_using_subcommand run" -l agent -d 'An agent which holds pages; give it once for each. Without any, gms starts one inside itself' -r
complete -c gms -n "__fish_gms_using_subcommand run" -l keys -d 'Directory with the keys of the cluster (see `gms keys init`); needed with --agent' -r -F
complete -c gms -n "__fish_gms_using_subcommand run" -l export -d 'Size of the agent inside gms, used without --agent [default: half of the memory available]' -r
complete -c gms -n "__fish_gms_using_subcommand run" -l when-full -d 'What happens while no agent takes pages that must go (all are full, or away) [default: grow]' -r -f -a "wait\t'The program waits until an agent takes pages again'
grow\t'The program goes on and exceeds --local'
kill\t'The program is killed after a second'"
complete -c gms -n "__fish_gms_using_subcommand run" -l stats -d 'Write the figures of the session to FILE as JSON when it ends' -r -F
complete -c gms -n "__fish_gms_using_subcommand run" -l trace -d 'Write the time stamps of sampled remote faults to FILE as CSV when the session ends' -r -F
complete -c gms -n "__fish_gms_using_subcommand run" -l config -d 'Read options from FILE (TOML with the names of the long options); the command line wins' -r -F
complete -c gms -n "__fish_gms_using_subcommand run" -s q -l quiet -d 'Print no summary'
complete -c gms -n "__fish_gms_using_subcommand run" -s v -l verbose -d 'Say what happens'
complete -c gms -n "__fish_gms_using_subcommand run" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c gms -n "__fish_gms_using_subcommand attach" -l local -d 'Most resident anonymous memory of the whole process tree (512M, 4G, or a share of all memory: 40%)' -r
complete -c gms -n "__fish_gms_using_subcommand attach" -l page-size -d 'Memory fetched for one fault [default: 4k]' -r -f -a "4k\t'4 KiB'
8k\t'8 KiB'"
complete -c gms -n "__fish_gms_using_subcommand attach" -l agent -d 'An agent which holds pages; give it once for each. Without any, gms starts one inside itself' -r
complete -c gms -n "__fish_gms_using_subcommand attach" -l keys -d 'Directory with the keys of the cluster (see `gms keys init`); needed with --agent' -r -F
complete -c gms -n "__fish_gms_using_subcommand attach" -l export -d 'Size of the agent inside gms, used without --agent [default: half of the memory available]' -r
complete -c gms -n "__fish_gms_using_subcommand attach" -l when-full -d 'What happens while no agent takes pages that must go (all are full, or away) [default: grow]' -r -f -a "wait\t'The program waits until an agent takes pages again'
grow\t'The program goes on and exceeds --local'
kill\t'The program is killed after a second'"
complete -c gms -n "__fish_gms_using_subcommand attach" -l stats -d 'Write the figures of the session to FILE as JSON when it ends' -r -F
complete -c gms -n "__fish_gms_using_subcommand attach" -l trace -d 'Write the time stamps of sampled remote faults to FILE as CSV when the session ends' -r -F
complete -c gms -n "__fish_gms_using_subcommand attach" -l config -d 'Read options from FILE (TOML with the names of the long options); the command line wins' -r -F
complete -c gms -n "__fish_gms_using_subcommand attach" -s q -l quiet -d 'Print no summary'
complete -c gms -n "__fish_gms_using_subcommand attach" -s v -l verbose -d 'Say what happens'
complete -c gms -n "__fish_gms_using_subcommand attach" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c gms -n "__fish_gms_using_subcommand detach" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_using_subcommand status" -l json -d 'A JSON list with one object for each workload'
complete -c gms -n "__fish_gms_using_subcommand status" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_using_subcommand top" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_using_subcommand doctor" -l agent -d 'Also check that this agent answers' -r
complete -c gms -n "__fish_gms_using_subcommand doctor" -l keys -d 'Also check these keys' -r -F
complete -c gms -n "__fish_gms_using_subcommand doctor" -l json -d 'A JSON list with one object for each check'
complete -c gms -n "__fish_gms_using_subcommand doctor" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_using_subcommand keys; and not __fish_seen_subcommand_from init issue help" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_using_subcommand keys; and not __fish_seen_subcommand_from init issue help" -f -a "init" -d 'Make a cluster: a certificate authority with a first node key and a first client key'
complete -c gms -n "__fish_gms_using_subcommand keys; and not __fish_seen_subcommand_from init issue help" -f -a "issue" -d 'Make one more key of a cluster'
complete -c gms -n "__fish_gms_using_subcommand keys; and not __fish_seen_subcommand_from init issue help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gms -n "__fish_gms_using_subcommand keys; and __fish_seen_subcommand_from init" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_using_subcommand keys; and __fish_seen_subcommand_from issue" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c gms -n "__fish_gms_using_subcommand keys; and __fish_seen_subcommand_from help" -f -a "init" -d 'Make a cluster: a certificate authority with a first node key and a first client key'
complete -c gms -n "__fish_gms_using_subcommand keys; and __fish_seen_subcommand_from help" -f -a "issue" -d 'Make one more key of a cluster'
complete -c gms -n "__fish_gms_using_subcommand keys; and __fish_seen_subcommand_from help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gms -n "__fish_gms_using_subcommand completion" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_using_subcommand man" -s h -l help -d 'Print help'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "run" -d 'Run a command with a limit on its resident memory; the rest of its memory lives on agents'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "attach" -d 'Page a process which runs already, and the processes below it, until it ends'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "detach" -d 'Bring all pages of a workload home and leave it running'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "status" -d 'Show the workloads which gms pages on this machine'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "top" -d 'Watch the workloads live; q quits'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "doctor" -d 'Check whether this machine can run gms; each finding comes with its cure'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "keys" -d 'Make the keys of a cluster'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "completion" -d 'Print the completion script of a shell'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "man" -d 'Write the man pages of gms into a directory'
complete -c gms -n "__fish_gms_using_subcommand help; and not __fish_seen_subcommand_from run attach detach status top doctor keys completion man help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gms -n "__fish_gms_using_subcommand help; and __fish_seen_subcommand_from keys" -f -a "init" -d 'Make a cluster: a certificate authority with a first node key and a first client key'
complete -c gms -n "__fish_gms_using_subcommand help; and __fish_seen_subcommand_from keys" -f -a "issue" -d 'Make one more key of a cluster'
