// Capture of streams, and graphs.
#pragma once

#include "events.h"

namespace driver {

struct Node {
  std::function<void()> run;
  std::vector<size_t> after;
};

struct Graph {
  std::vector<Node> nodes;
  // Of each captured stream, by its id, what its next node follows.
  std::map<uint64_t, std::vector<size_t>> tails;
  uint64_t origin;
  cudaStreamCaptureMode mode;
  bool is_open = true;
  std::string invalidated;  // why, if it is
};

void add_node(Stream* stream, std::function<void()> run);
Status join_capture(Stream* stream, Event* event);
Status begin_capture(Stream* stream, cudaStreamCaptureMode mode);
Status end_capture(Stream* stream, void** graph);
Status instantiate(void* graph, void** executable);
Status launch_graph(void* executable, Stream* stream);
Status destroy_graph(void* graph);

// A call that waits, or asks, is not allowed on a stream that is captured, and spoils the capture.
Status refuse_if_captured(Stream* stream, const char* call);
// Nor are these while any stream is captured, unless its mode is relaxed.
Status refuse_while_capturing(const char* call);
// The legacy stream would have to be captured, too.
Status refuse_implicit(Stream* legacy, const char* call);

}  // namespace driver
