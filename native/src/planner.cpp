// The module _planner: the exact rollout partition and the pipeline recurrences.
#include <nanobind/nanobind.h>

void bind_partition(nanobind::module_& m);
void bind_pipeline(nanobind::module_& m);

NB_MODULE(_planner, m) {
  m.doc() = "Exact rollout partition, greedy mixing, and 1F1B pipelines of unequal micro-batches";
  nanobind::set_leak_warnings(false);  // a solver held at module level may outlive the interpreter's last collection
  bind_partition(m);
  bind_pipeline(m);
}
