// Laws of the parts below the protocol: wires and cursors, 16-bit floats, addresses, tags, and the waits of the CPU Atom one by one.
#include "unit/addresses.hpp"
#include "unit/floats.hpp"
#include "unit/waits.hpp"
#include "unit/wires.hpp"

int main() {
  using namespace purlin::test;
  laws_of_wires();
  laws_of_floats();
  laws_of_addresses();
  laws_of_waits();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
