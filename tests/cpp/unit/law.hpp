// A law is a function that says whether it holds; those that do not are named.
#pragma once
#include <cstdio>
#include <string>

namespace purlin::test {
namespace {

int passed = 0, failed = 0;

template <class F>
void law(const std::string& name, F holds) {
  bool ok = holds();
  ++(ok ? passed : failed);
  if (!ok) std::printf("FAILED: %s\n", name.c_str());
}

}  // namespace
}  // namespace purlin::test
