// What team/team.cpp offers to kernels, and to the replay of captured steps.
#pragma once

#include <cstdint>

// Memory that a job reads from begin to end; each of the team's threads begins with an equal part.
struct Stream {
  const void* begin = nullptr;
  int64_t bytes = 0;
};

// What a step's jobs read, as its last run had them. It belongs to whoever repeats the step.
struct GraphsrtJobs;

extern "C" {
GraphsrtJobs* graphsrt_new_jobs();
void graphsrt_delete_jobs(GraphsrtJobs* jobs);

// This memory will be there, and may be read at any time, for as long as the step is repeated.
void graphsrt_jobs_stay(GraphsrtJobs* jobs, Stream memory);

// body(context) on this thread, while `threads` - 1 others wait for jobs of its kernels. They are OpenMP's, so what
// OpenMP would make parallel meanwhile runs on this thread alone. Throws what body throws.
void graphsrt_team_lead(int64_t threads, GraphsrtJobs* jobs, void (*body)(void* context), void* context);

// Threads of the team that this thread leads, itself among them; 0 if it leads none.
int64_t graphsrt_team_size();

// job(context, w) with w = 0 on this thread, which leads the team, and on others as they come, each with a number of
// its own below the team's size. The call with 0 must see to it that all is done or taken. Throws what one of them
// throws, after all have returned.
void graphsrt_team_run(void (*job)(const void* context, int64_t w), const void* context, Stream read);
}
