# Sourced by the scripts, before they do anything: -h or --help prints the comment at the top of the script, and ends it.
for option; do
  case $option in
    -h | --help)
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
  esac
done
